"""Common parts of the language-model figures: runs, their text, size and cost.

Compared models see the same tokens in the same order and have as many parameters as softmax heads, within 1 %.  Scores
are bits per byte: lower is better.  Scores are compared only if all runs read the same text, because Python versions
differ in their standard libraries.  Both papers trained each model once and print no errors, so their own numbers
cannot be tested.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from polyhead.config import Run, SymbolicAttention
from polyhead.papers.language.models import LanguageScale, model
from polyhead.papers.sizes import training
from polyhead.papers.study import Cell, Study
from polyhead.tasks import Text

SPLITS = ("validation", "iid")
GB = 10**9
LIBRARY = SymbolicAttention(count=64, heads=4, trainable=False)


# ---------------------------------------------------------------------------------------------------------------- runs
def compared(name: str, rows: Sequence[str], shape: LanguageScale, *, matched: bool = True) -> tuple[Run, ...]:
    """Return the runs of every model, setting and seed, which are scored on held-out text during training, too."""
    runs = []
    for seed, row, setting in itertools.product(range(shape.seeds), rows, shape.grid()):
        train = replace(
            training(shape, setting, SPLITS),
            eval_every=max(shape.steps // shape.evaluations, 1),
            precision=shape.precision,
            accumulate=shape.accumulate,
        )
        settings = model(row, shape, matched=matched)
        runs.append(Run(name=f"{name}-{row}-{seed}", task=shape.task, model=settings, train=train, seed=seed))
    return tuple(runs)


# --------------------------------------------------------------------------------------------------------------- text
SAME_WINDOWS = (
    " All seeds and models are scored on the same windows of it. So ± of bits per byte and of accuracy has their "
    "sampling error in full, however many seeds there are. In a difference of two models it cancels: such a claim is "
    "about these windows. ± of a perplexity is over seeds alone."
)


def one_text(study: Study) -> tuple[bool, str]:
    """Return whether all runs of a study read the same text, and a note about it."""
    fingerprints: set[str] = set()
    sources: set[str] = set()
    for point in study.points:
        assert isinstance(point.run.task, Text)
        fingerprints.add(point.fingerprint() or "unknown")
        sources.add(point.run.task.data)
    data = ", ".join(sorted(sources))
    if fingerprints == {"unknown"}:
        return False, f"Text: {data}; its fingerprint was not kept, so no claim is put to these runs."
    if len(fingerprints) > 1:
        several = ", ".join(sorted(fingerprints))
        return False, f"Texts of several fingerprints ({several}) of {data}: no claim is put to these runs."
    note = f"Text: {data}, fingerprint {fingerprints.pop()}. Scores can be compared where it is the same."
    if len({point.run.seed for point in study.points}) > 1:
        note += SAME_WINDOWS
    return True, note


def update_tokens(run: Run) -> int:
    """The number of tokens in one update."""
    return int(run.train.batch_size * run.task.length)


# ------------------------------------------------------------------------------------------------- drawing and tables
def course(cell: Cell, metric: str | None = None) -> dict[float, list[float]]:
    """Scores of a cell's seeds on validation text, by millions of training tokens."""
    size = update_tokens(cell.points[0].run)
    return {step * size / 1e6: values for step, values in cell.course("validation", metric).items()}


def cost(cell: Cell) -> dict[str, str]:
    """The size, tokens and time of a run."""
    run = cell.points[0].run
    minutes = sum(point.result.seconds for point in cell.points) / 60 / len(cell.points)
    return {
        "parameters": f"{cell.points[0].result.parameters:,}",
        "million tokens": f"{run.train.steps * update_tokens(run) / 1e6:,.2f}",
        "minutes of a run": f"{minutes:.1f}",
    }
