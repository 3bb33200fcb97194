"""Analyses of a checkpoint for a report: maps of the code on unseen tasks, probes of every layer, zeroed heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyhead.analysis.ablate import zero_heads
from polyhead.analysis.geometry import METHODS, embed, purity
from polyhead.analysis.labels import class_name, distinct, targets, unreadable, views, with_field
from polyhead.analysis.probe import probe_model, query_codes
from polyhead.config import Run, Task, TransformerConfig
from polyhead.pages.report.runs import Entry, OpenedCheckpoint, Progress, SeedGroup, reason
from polyhead.train import load_model

Array = np.ndarray
POINTS = 500  # points per map: enough to see clusters, few enough for the page's size
PROBED = 2048  # sequences to fit a probe, and equally many to score it
ZEROED = 512  # sequences per zeroed head
NEIGHBOURS = 10
SAMPLES = 12  # most single codes drawn per class


@dataclass(frozen=True)
class CodeMap:
    """The codes (b n) of one layer in one view, and their coordinates (b 2) by method.

    `number`: the target of each sequence, which colours the map.  `labels`: classes by name: "function" and "term 1",
    ..., or "rule".  `purity`: of a code's neighbours and by chance, for each label and for integer targets.
    """

    view: str
    layer: int
    codes: Array
    points: dict[str, Array]
    number: Array
    labels: dict[str, Array]
    purity: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class CheckpointAnalysis(OpenedCheckpoint):
    """Analyses of a checkpoint: `rows` from `analysis.probe_run`, and `zeroed` from `analysis.zero_heads`."""

    maps: tuple[CodeMap, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    zeroed: tuple[dict[str, Any], ...] = ()

    @property
    def views(self) -> list[str]:
        return list(dict.fromkeys(found.view for found in self.maps))

    def layers(self, view: str) -> list[CodeMap]:
        """The maps of one view, from the first layer to the last."""
        return [found for found in self.maps if found.view == view]


def analyse(found: Sequence[SeedGroup], progress: Progress) -> list[CheckpointAnalysis]:
    """Probe and map every finished run; a note gives the reason if a checkpoint cannot be used."""
    results = []
    for group in found:
        for entry in group.finished:
            progress(f"codes of {entry.folder.name}: probes, maps, heads zeroed")
            results.append(_one(entry, group))
    return results


def _one(entry: Entry, group: SeedGroup) -> CheckpointAnalysis:
    try:
        run, model = load_model(entry.folder)
        if why := _unfit(run):
            return CheckpointAnalysis(entry, group, why)
        rows = tuple(probe_model(model, run.task, sequences=PROBED, seed=run.seed))
        if not rows:
            raise ValueError("its batches have no labels: integer latents, or an integer target")
        maps = tuple(code_maps(model, run.task, points=POINTS, seed=run.seed))
        zeroed = tuple(zero_heads(model, run.task, sequences=ZEROED, seed=run.seed))
    except (ValueError, OSError) as error:
        return CheckpointAnalysis(entry, group, reason(entry, "code maps and probes", error))
    return CheckpointAnalysis(entry, group, "", maps, rows, zeroed)


def _unfit(run: Run) -> str:
    """Why the code of the last token is not informative for this task, or ""."""
    if why := unreadable(run.task):
        return f"No code maps and probes: {why}."
    return "" if isinstance(run.model, TransformerConfig) else f"No code maps and probes of {type(run.model).__name__}."


def code_maps(model: nn.Module, task: Task, *, points: int = POINTS, seed: int = 0, first: int = 0) -> list[CodeMap]:
    """Maps of the last token's code on unseen tasks, one per view and layer (Schug et al., figures 5A, 5B, A2).

    If the task offers `inputs="fixed_context"`, all sequences have the same context inputs, so points differ only by
    function and query.
    """
    found = []
    for view, (drawn, pairs) in views(task).items():
        fixed = with_field(drawn, "inputs", "fixed_context")
        layers, batch = query_codes(model, fixed, "compositional", points, pairs=pairs, seed=seed, purpose="maps")
        labels = targets(batch)
        terms = {name: values for name, values in labels.items() if name.startswith("term")}
        shown = {name: values for name, values in labels.items() if name != "target value"}
        shown = ({"function": _functions(terms)} if len(terms) > 1 else {}) | shown
        kept = distinct(batch)
        near = min(NEIGHBOURS, len(kept) - 1)
        for layer, codes in [*enumerate(layers)][first:]:
            some = labels.items() if near else ()  # a single input has no neighbours
            pure = {name: purity(codes[kept], values[kept], neighbours=near) for name, values in some}
            at = {method: embed(codes, method, seed) for method in METHODS}
            found.append(CodeMap(view, layer, codes, at, _number(batch.targets[:, -1]), shown, pure))
    return found


def class_names(task: Task, layer: CodeMap, label: str) -> dict[int, str]:
    """The labels of points: a term "¬x₁x₂x₃¬x₄", terms joined by "or" for a function, or the name of a rule."""
    if label != "function":
        return {int(i): class_name(task, label, int(i)) for i in np.unique(layer.labels[label])}
    terms = {name: values.tolist() for name, values in layer.labels.items() if name != "function"}
    rows = zip(layer.labels["function"].tolist(), *terms.values(), strict=True)
    return {
        row[0]: " or ".join(class_name(task, name, i) for name, i in zip(terms, row[1:], strict=True)) for row in rows
    }


def samples(layer: CodeMap, label: str) -> tuple[Array, Array]:
    """Codes (b n) and labels (b) of at most `SAMPLES` sequences per class, class after class."""
    values = layer.labels[label]
    chosen = np.concatenate([np.flatnonzero(values == each)[:SAMPLES] for each in np.unique(values)])
    return layer.codes[chosen], values[chosen]


def head_names(entry: Entry, found: CodeMap) -> list[str]:
    """Row names for a picture of codes: "head 3", or "key 27, head 3" with several pairs."""
    pairs = entry.run.task.pairs[found.view]
    heads = found.codes.shape[1] // len(pairs)
    if len(pairs) == 1:
        return [f"head {head + 1}" for head in range(heads)]
    return [f"key {key}, head {head + 1}" for _, key in pairs for head in range(heads)]


def _number(target: Tensor) -> Array:
    return target.reshape(len(target), -1)[:, 0].double().cpu().numpy()


def _functions(terms: dict[str, Array]) -> Array:
    """One label per combination of terms, numbered in sorted order."""
    rows = np.stack(list(terms.values()), axis=1)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
