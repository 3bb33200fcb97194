"""Objects: sorting (learning curves), pairwise order and SET (Abstractors, Altabaa et al. 2024)."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from polyhead.config import Learned, Run
from polyhead.papers.claims import Verdict
from polyhead.papers.dual.models import BY_PLACE, DUAL
from polyhead.papers.dual.shared import (
    ASYMMETRIC,
    COMPARED,
    EARLIER,
    WRITERS,
    Cells,
    better,
    by_examples,
    classified,
    course,
    learns,
    operators,
    run_of,
    single,
    table,
    written,
)
from polyhead.papers.figure import Figure
from polyhead.papers.outcome import (
    SEED_CAPTION,
    FigureOutcome,
    Picture,
    cells_by_model,
    is_complete_grid,
    scores_by_model,
)
from polyhead.papers.sizes import SMOKE, Scale, size
from polyhead.papers.study import Study
from polyhead.tasks import ObjectSorting, PairwiseOrder, SetCards

# fmt: off
OBJECTS: dict[str, Scale] = {
    "paper": Scale(
        dim=64, hidden=128, layers=2, heads=2, head_dim=32, positions=Learned(), act="relu",
        steps=1600, batch_size=512, clip=None, final=1.0,
        lrs=(1e-3,), decays=(0.0,), warmups=(0,), seeds=10, eval_batches=20,
    ),
    "small": Scale(
        dim=64, hidden=128, layers=2, heads=4, head_dim=16, positions=Learned(), act="relu",
        steps=1200, batch_size=64, clip=1.0,
        lrs=(2e-3,), decays=(0.0,), warmups=(100,), seeds=3, eval_batches=16,
    ),
    "smoke": replace(SMOKE, positions=Learned(), act="relu"),
}
# fmt: on

SORTED = {"paper": (100, 500, 1000, 1500, 2000, 2500, 3000), "small": (600, 2000), "smoke": (16, 32)}
"""Sizes of the training sets of sorting."""


def sorting(scale: str = "small") -> tuple[Run, ...]:
    """Object sorting by number of training sequences: an encoder reads objects, a decoder writes their order.

    polyhead reproduce sorting.  Paper (Abstractors): ten of 48 objects, width 64, 2 heads, Adam, 400 epochs with
    batches of 512, 100 to 3000 sequences, ten trials; it prints no table.  Small: six objects, 4 heads, 1200 steps with
    batches of 64 for any number of sequences, 600 and 2000 sequences.

    Our choices, for an equal comparison or where the papers are silent [the papers']: all models have two layers [the
    transformer four, the Abstractor one or two] and feed-forward layers of twice the width [the width]; no early
    stopping [patience 50]; learned positions [sinusoidal]; asymmetric relations, position symbols.
    """
    shape = size(OBJECTS, scale)
    runs = []
    for seed, n in itertools.product(range(shape.seeds), SORTED[scale]):
        sized = replace(shape, steps=400 * -(-n // shape.batch_size)) if scale == "paper" else shape
        task = ObjectSorting(length=10 if scale == "paper" else 6, examples=n, split_seed=seed)
        for row, setting in itertools.product((*WRITERS, *EARLIER), sized.grid()):
            model = written(task, (task.source, task.length), row, sized, ASYMMETRIC)
            runs.append(run_of(f"sorting-{n}-{row}-{seed}", task, model, sized, setting))
    return tuple(runs)


def order(scale: str = "small") -> tuple[Run, ...]:
    """Pairwise order: which of two objects comes first, on pairs that never occur in training.

    polyhead reproduce order.  Paper (Abstractors): 64 objects, half of the ordered pairs in training, 35 % in the test;
    it shows a plot.  Small: the same pairs, 600 steps with batches of 64.
    """
    shape = _objects(scale)
    seeds = range(shape.seeds)
    return classified("order", [PairwiseOrder(split_seed=seed) for seed in seeds], COMPARED, shape, ASYMMETRIC)


def set_cards(scale: str = "small") -> tuple[Run, ...]:
    """SET: do three cards make a set, on triples that never occur in training.

    polyhead reproduce set.  Paper (Abstractors): a plot of models trained on embeddings of card images; here a card is
    given by its attributes.  Small: all 1080 training triples, 600 steps with batches of 64.
    """
    shape = _objects(scale)
    return classified("set", [SetCards(split_seed=seed) for seed in range(shape.seeds)], COMPARED, shape, BY_PLACE)


def _objects(scale: str) -> Scale:
    """The size of models that classify objects."""
    shape = size(OBJECTS, scale)
    return (
        shape if scale == "paper" else replace(shape, steps=max(shape.steps // 2, 1), heads=2, head_dim=shape.dim // 2)
    )


def sorting_dual() -> Run:
    """Dual attention sorts six objects by an order learned from 2000 examples, with an encoder and a decoder.

    polyhead train sorting-dual.  1200 steps with batches of 64, about half a minute of one core.
    """
    return single("sorting-dual", sorting("small"), "sorting-2000-dual-0")


# --------------------------------------------------------------------------------------------------- claims and drawing


def draw_sorting(study: Study) -> FigureOutcome:
    """Draw the share of whole orders right, by number of training sequences."""
    placed = cells_by_model(study, "task", "examples")
    figure = by_examples(placed, "iid", "training sequences", 0.0)
    cells = {condition[1:]: by for condition, by in placed.items()}
    columns = (("sorted", "iid", None), ("elements", "iid", "element_accuracy"), ("noisy objects", "novel", None))
    verdicts: list[Verdict] = []
    if is_complete_grid(cells):
        curve = {n: scores_by_model(by, "iid") for (n,), by in cells.items()}
        verdicts = learns("sorting", curve)
        at = {f"n {n}": found for n, found in curve.items()}
        verdicts += better("sorting", "abstractor", ("softmax", "dual"), at)
        verdicts += operators("sorting", at)
    caption = f"Sequences sorted without a mistake, as a decoder writes them; {SEED_CAPTION}."
    found = table(cells, ("sequences",), columns)
    return replace(found, pictures=(Picture("sorting", caption, figure),), verdicts=tuple(verdicts))


def _draw(what: str) -> Callable[[Study], FigureOutcome]:
    """The drawing of a task that classifies objects; the task is the only place."""

    def claim(cells: Cells) -> list[Verdict]:
        ((_, by),) = cells.items()
        at = {what: scores_by_model(by, "compositional")}
        found = better(what, "dual", ("softmax",), at)
        found += better(what, "abstractor", ("softmax",), at)
        found += better(what, "corelnet", ("dual",), at)
        return found + operators(what, at)

    columns = (("unseen", "compositional", None), ("validation", "validation", None))
    return course("task", columns, claim, lambda condition, model: "a plot")


FIGURES = {
    "sorting": Figure("Object sorting: learning curves", DUAL, draw_sorting, sorting, minutes=17.5),
    "order": Figure("Pairwise order", DUAL, _draw("pairwise order"), order, minutes=3.9),
    "set": Figure("SET", DUAL, _draw("SET"), set_cards, minutes=4.0),
}
