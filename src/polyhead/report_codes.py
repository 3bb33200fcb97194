"""What a report computes from a checkpoint: maps of the latent code on unseen tasks, and probes of every layer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyhead.analysis.geometry import METHODS, embed
from polyhead.analysis.probe import probe_model, query_codes, targets
from polyhead.config import Task
from polyhead.report_data import Entry, Group, Progress
from polyhead.train import load_model

Array = np.ndarray
POINTS = 500  # a map; enough to see clusters, few enough for a page of maps
PROBED = 2048  # sequences to fit a probe, and as many to score it


@dataclass(frozen=True)
class CodeMap:
    """The codes of one layer as points: coordinates (b 2) by method, and the labels by which they are coloured.

    `number`: the target of each sequence.  `labels`: class labels by name, "function" and the parts ("term 1", ...).
    """

    layer: int
    points: dict[str, Array]
    number: Array
    labels: dict[str, Array]


@dataclass(frozen=True)
class Analysed:
    """What one checkpoint shows.  `rows` are those of `analysis.probe_run`; `note` says why there is nothing."""

    entry: Entry
    group: Group
    maps: tuple[CodeMap, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    note: str = ""


def analyse(found: Sequence[Group], progress: Progress) -> list[Analysed]:
    """Probe and map every finished run; one whose checkpoint cannot be used says why in a line."""
    results = []
    for group in found:
        for entry in group.finished:
            progress(f"codes of {entry.folder.name}: probes and maps")
            results.append(_one(entry, group))
    return results


def _one(entry: Entry, group: Group) -> Analysed:
    name = entry.folder.name
    try:
        run, model = load_model(entry.folder)
    except (ValueError, OSError) as error:
        return Analysed(entry, group, note=f"{name}: no code maps and probes ({' '.join(str(error).split())})")
    task = run.task
    if "compositional" not in task.splits:
        return Analysed(entry, group, note=f"{name}: no code maps and probes (its task has no compositional split)")
    try:
        rows = tuple(probe_model(model, task, sequences=PROBED, seed=run.seed))
        maps = tuple(code_maps(model, task, points=POINTS, seed=run.seed))
    except ValueError as error:
        return Analysed(entry, group, note=f"{name}: no code maps and probes ({' '.join(str(error).split())})")
    return Analysed(entry, group, maps, rows)


def code_maps(model: nn.Module, task: Task, *, points: int = POINTS, seed: int = 0) -> list[CodeMap]:
    """One map per layer of the code of the query attending to itself, on unseen tasks (Schug et al., figure A2).

    All sequences show the same context inputs where the task offers that (`inputs="fixed_context"`): what moves a point
    is its function and its query.
    """
    if any(f.name == "inputs" for f in dataclasses.fields(task)):
        fixed: Any = task
        task = dataclasses.replace(fixed, inputs="fixed_context")
    layers, batch = query_codes(model, task, "compositional", points, seed=seed, purpose="maps")
    labels = targets(batch.latents)
    number = _number(batch.targets[:, -1])
    functions = _functions(labels)
    named = ({"function": functions} if functions is not None else {}) | labels
    return [
        CodeMap(layer, {method: embed(codes, method, seed) for method in METHODS}, number, named)
        for layer, codes in enumerate(layers)
    ]


def _number(target: Tensor) -> Array:
    return target.reshape(len(target), -1)[:, 0].double().cpu().numpy()


def _functions(labels: dict[str, Array]) -> Array | None:
    """One label per combination of parts, numbered in sorted order."""
    if len(labels) < 2:
        return None
    rows = np.stack(list(labels.values()), axis=1)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
