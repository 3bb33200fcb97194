"""Common parts of the language-model figures: runs, their text, and tables of final scores.

Compared models see the same tokens in the same order and have as many parameters as softmax heads, within 1 %.  Scores
are bits per byte: lower is better.  Scores are compared only if all runs read the same text, because Python versions
differ in their standard libraries.  Both papers trained each model once and print no errors, so their own numbers
cannot be tested.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyhead.config import Run, SymbolicAttention, TransformerConfig
from polyhead.papers.claims import Estimate, Scores
from polyhead.papers.language.models import ROWS, LanguageScale, model
from polyhead.papers.outcome import FigureOutcome, settings_note
from polyhead.papers.sizes import Setting, training
from polyhead.papers.study import Cell, Study
from polyhead.tasks import Text

SPLITS = ("validation", "iid")
GB = 10**9
LIBRARY = SymbolicAttention(count=64, heads=4, trainable=False)


def compared(what: str, rows: Sequence[str], shape: LanguageScale, *, matched: bool = True) -> tuple[Run, ...]:
    """The runs of every model, setting and seed of `shape`."""
    models = {row: model(row, shape, matched=matched) for row in rows}
    every = itertools.product(range(shape.seeds), rows, shape.grid())
    return tuple(run_of(f"{what}-{row}-{seed}", models[row], shape, setting, seed) for seed, row, setting in every)


def run_of(name: str, settings: TransformerConfig, shape: LanguageScale, setting: Setting, seed: int) -> Run:
    """A run that is scored on held-out text during training and at its end."""
    train = replace(
        training(shape, setting, SPLITS),
        eval_every=max(shape.steps // shape.evaluations, 1),
        precision=shape.precision,
        accumulate=shape.accumulate,
    )
    return Run(name=name, task=shape.task, model=settings, train=train, seed=seed)


def lower(scores: Scores, one: str, others: tuple[str, ...]) -> dict[str, Estimate]:
    """The score of each of `others` that was run, minus that of `one`."""
    return {f"{ROWS[o].label} − {ROWS[one].label}": scores[o] - scores[one] for o in others if o in scores}


def one_text(study: Study) -> tuple[bool, str]:
    """Whether all runs of a study read the same text, and a note about it."""
    found = sorted({point.fingerprint() or "unknown" for point in study.points})
    data = ", ".join(sorted({point.run.task.data for point in study.points if isinstance(point.run.task, Text)}))
    if found == ["unknown"]:
        return False, f"Text: {data}; its fingerprint was not kept, so no claim is put to these runs."
    if len(found) == 1:
        same = f"Text: {data}, fingerprint {found[0]}. Scores can be compared where it is the same."
        return True, same + (ONE_TEXT if len({point.run.seed for point in study.points}) > 1 else "")
    return False, f"Texts of several fingerprints ({', '.join(found)}) of {data}: no claim is put to these runs."


ONE_TEXT = (
    " All seeds and models are scored on the same windows of it. So ± of bits per byte and of accuracy has their "
    "sampling error in full, however many seeds there are. In a difference of two models it cancels: such a claim is "
    "about these windows. ± of a perplexity is over seeds alone."
)


def update_tokens(run: Run) -> int:
    """The number of tokens in one update."""
    return int(run.train.batch_size * run.task.length)


def course(cell: Cell, metric: str | None = None) -> dict[float, list[float]]:
    """Scores of a cell's seeds on validation text, by millions of training tokens."""
    size = update_tokens(cell.points[0].run)
    return {step * size / 1e6: values for step, values in cell.course("validation", metric).items()}


def table(cells: Mapping[Any, tuple[str, Cell]], axis: str, notes: tuple[str, ...]) -> FigureOutcome:
    """A table with a row per cell: final score, size and time."""
    measured = (
        ("bits per byte, validation", "validation", None),
        ("bits per byte, iid", "iid", None),
        ("perplexity, iid", "iid", "perplexity"),
        ("accuracy, iid", "iid", "accuracy"),
    )
    rows, found = [], {}
    for place, (name, cell) in cells.items():
        values = {head: cell.score(split, metric) for head, split, metric in measured}
        rows.append((name, *map(str, values.values()), *cost(cell)))
        found[str(place)] = {head: value.as_json() for head, value in values.items()}
    ran = {name for name, _ in cells.values()}
    choices = (f"{row.label}: {row.choice}." for row in ROWS.values() if row.choice and row.label in ran)
    head = (axis, *(head for head, _, _ in measured), *COST)
    notes = (*notes, *choices, settings_note(cell for _, cell in cells.values()))
    return FigureOutcome(head=head, rows=tuple(rows), numbers=found, notes=notes)


COST = ("parameters", "million tokens", "minutes of a run")


def cost(cell: Cell) -> tuple[str, ...]:
    """The size, tokens and time of a run."""
    run = cell.points[0].run
    minutes = sum(point.result.seconds for point in cell.points) / 60 / len(cell.points)
    tokens = run.train.steps * update_tokens(run) / 1e6
    return f"{cell.points[0].result.parameters:,}", f"{tokens:,.2f}", f"{minutes:.1f}"
