"""Single inputs in a report, with the attention, relations and symbols of every layer.

They show one finished run of each mechanism, on a few sequences that neither training nor evaluation uses.  The page
size is limited: for long sequences only the last tokens are shown, and for large models fewer examples.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from polyhead.analysis.capture import as_array, looking
from polyhead.analysis.probe import draws
from polyhead.analysis.relations import LayerLook, Picture, look, picture
from polyhead.config import Batch, Task
from polyhead.pages.report.runs import HEADLINE, Entry, OpenedCheckpoint, Progress, SeedGroup, in_order, reason
from polyhead.train import load_model
from polyhead.train.evaluation import predict

Array = np.ndarray
EXAMPLES = 3
TOKENS = 64  # most tokens of a sequence
CELLS = 300_000  # most cells of all matrices of a run
KINDS = ("attention", "relations", "symbols")


@dataclass(frozen=True)
class Example:
    """One input: its description, its image if it has one, and its attention in every layer.

    `last`: the number of its last tokens that the layers show; None: all.
    """

    text: str
    image: Picture | None
    layers: tuple[LayerLook, ...]
    last: int | None = None


@dataclass(frozen=True)
class Map:
    """One matrix: a head's attention, a relation, or the assignment of symbols to tokens.

    `columns`: their names; None for symbols, which are numbered.  `limit`: the largest absolute value among the
    matrices of the same kind and group.
    """

    name: str
    values: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...] | None
    limit: float
    signed: bool


@dataclass(frozen=True)
class CheckpointExamples(OpenedCheckpoint):
    """The examples of one checkpoint on a split."""

    split: str = ""
    examples: tuple[Example, ...] = ()

    @property
    def related(self) -> bool:
        """Whether any layer has relations or symbols."""
        return any(maps(layer)[kind] for layer in self.examples[0].layers for kind in KINDS[1:])


def looks(found: Sequence[SeedGroup], progress: Progress) -> list[CheckpointExamples]:
    """The examples of the first finished run of each mechanism, or the reason why there are none."""
    results = []
    for group in found:
        for entry in group.finished[:1]:
            progress(f"attention of {entry.folder.name}")
            results.append(_one(entry, group))
    return results


def maps(layer: LayerLook) -> dict[str, list[Map]]:
    """All matrices of a layer, by kind: "attention" of each head, "relations", "symbols" of each symbolic head."""
    found: dict[str, list[Map]] = {kind: [] for kind in KINDS}
    kinds = [group.kind for group in layer.groups]
    for group in layer.groups:
        beside = f" ({group.kind})" if len(set(kinds)) > 1 else ""
        symbols = None if group.assignments is None else group.assignments.transpose(1, 0, 2)
        for kind, values in zip(KINDS, (group.attention, group.relations, symbols), strict=True):
            if values is None:
                continue
            limit, signed = float(np.abs(values).max(initial=0)) or 1.0, bool(values.min(initial=0) < 0)
            rows, columns = (layer.senders, None) if kind == "symbols" else (layer.receivers, layer.senders)
            word = "relation" if kind == "relations" else "head"
            for each in values:
                name = f"{word} {len(found[kind]) + 1}{beside if kind == 'attention' else ''}"
                found[kind].append(Map(name, each, rows, columns, limit, signed))
    return found


def _one(entry: Entry, group: SeedGroup) -> CheckpointExamples:
    try:
        run, model = load_model(entry.folder)
        split = in_order(run.task.splits, HEADLINE)[0]
        (batch,) = draws(run.task, split, EXAMPLES, seed=run.seed, purpose="look")
        examples = tuple(_examples(model, run.task, batch))
        if not all(np.isfinite(each.values).all() for example in examples for each in _every(example.layers)):
            raise ValueError("its figures are not finite")
    except (ValueError, OSError) as error:
        return CheckpointExamples(entry, group, reason(entry, "attention maps", error))
    return CheckpointExamples(entry, group, "", split, examples)


def _examples(model: nn.Module, task: Task, batch: Batch) -> Iterator[Example]:
    left = CELLS
    with looking(model):
        outputs = predict(model, task, batch).float()
    for i in range(EXAMPLES):
        whole, most = look(model, batch, sample=i, task=task), TOKENS
        layers = tuple(_cut(layer, most) for layer in whole)
        if (cells := _cells(layers)) > left:
            if i:
                return
            most = TOKENS // 2
            layers = tuple(_cut(layer, most) for layer in whole)
        left -= cells
        longer = max(len(side) for layer in whole for side in (layer.receivers, layer.senders)) > most
        words = describe(task, batch, outputs, i)
        yield Example(words, picture(model, batch, sample=i), layers, most if longer else None)


def _every(layers: Sequence[LayerLook]) -> Iterator[Map]:
    return (each for layer in layers for kind in maps(layer).values() for each in kind)


def _cells(layers: Sequence[LayerLook]) -> int:
    return sum(each.values.size for each in _every(layers))


def _cut(layer: LayerLook, most: int) -> LayerLook:
    """A layer with only the last `most` queries and keys."""
    groups = tuple(
        dataclasses.replace(
            group,
            attention=group.attention[:, -most:, -most:],
            relations=None if group.relations is None else group.relations[:, -most:, -most:],
            assignments=None if group.assignments is None else group.assignments[-most:],
        )
        for group in layer.groups
    )
    return LayerLook(layer.name, layer.receivers[-most:], layer.senders[-most:], groups)


def describe(task: Task, batch: Batch, outputs: Tensor, i: int) -> str:
    """The question of sample `i`, its answer, and the model's answer.

    `outputs`: of the model; a decoder reads the true answer so far (teacher forcing).
    """
    scored = as_array(batch.scored[i]).astype(bool)
    targets, given = as_array(batch.targets[i])[scored], as_array(outputs[i])[scored]
    if batch.targets.is_floating_point():
        wanted, said = (f"{float(values.reshape(-1)[-1]):.3f}".replace("-", "−") for values in (targets, given))
    else:
        wanted, said = (task.written(values.reshape(-1).tolist()) for values in (targets, given.argmax(-1)))
    asked = task.asked(batch, i)
    return f"{asked} {wanted[:1].upper() + wanted[1:] if asked.endswith('?') else wanted}; the model says {said}."
