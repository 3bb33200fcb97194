"""Objects: sorting (learning curves), pairwise order and SET (Abstractors, Altabaa et al. 2024)."""

import itertools
import math
from dataclasses import replace
from functools import partial

from polyhead.analysis.claims import Verdict
from polyhead.config import Learned, Run
from polyhead.papers.dual import shared
from polyhead.papers.dual.models import BY_PLACE, DUAL, Relations
from polyhead.papers.dual.shared import ASYMMETRIC, COMPARED, better, operators
from polyhead.papers.outcome import SEED_CAPTION, Cells, Figure, FigureOutcome, Picture, is_complete_grid, score_table
from polyhead.papers.sizes import SMOKE, Scale, size
from polyhead.papers.study import Study
from polyhead.tasks import ObjectSorting, PairwiseOrder, SetCards

# ---------------------------------------------------------------------------------------------------------------- runs
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

# Sizes of the training sets of sorting.
SORTED = {"paper": (100, 500, 1000, 1500, 2000, 2500, 3000), "small": (600, 2000), "smoke": (16, 32)}


def sorting(scale: str = "small") -> tuple[Run, ...]:
    """Object sorting by number of training sequences: an encoder reads objects, a decoder writes their order.

    polyhead reproduce sorting.  Paper (Abstractors): ten objects and 400 epochs; it prints no table.  Small: six
    objects, as many steps for any number of sequences.  All models have two layers and asymmetric relations.
    """
    shape = size(OBJECTS, scale)
    plans: list[shared.RunPlan] = []
    for seed, n in itertools.product(range(shape.seeds), SORTED[scale]):
        sized, length = shape, 6
        if scale == "paper":
            sized, length = replace(shape, steps=400 * math.ceil(n / shape.batch_size)), 10  # 400 epochs
        task = ObjectSorting(length=length, examples=n, split_seed=seed)
        plans.append((task, sized, f"sorting-{n}", seed))
    return shared.compared(plans, (*shared.WRITERS, *shared.EARLIER), ASYMMETRIC)


def order(scale: str = "small") -> tuple[Run, ...]:
    """Pairwise order: which of two objects comes first, on pairs that never occur in training.

    polyhead reproduce order.  Paper (Abstractors): 64 objects, half of the ordered pairs in training, 35 % in the test;
    it shows a plot.
    """
    return _classified(scale, "order", PairwiseOrder, ASYMMETRIC)


def set_cards(scale: str = "small") -> tuple[Run, ...]:
    """SET: do three cards make a set, on triples that never occur in training.

    polyhead reproduce set.  Paper (Abstractors): a plot of models trained on embeddings of card images; here a card is
    given by its attributes.
    """
    return _classified(scale, "set", SetCards, BY_PLACE)


def _classified(
    scale: str, name: str, kind: type[PairwiseOrder] | type[SetCards], relations: Relations
) -> tuple[Run, ...]:
    """The runs of models that classify objects, with a split of its own for each seed."""
    shape = size(OBJECTS, scale)
    if scale != "paper":
        shape = replace(shape, steps=max(shape.steps // 2, 1), heads=2, head_dim=shape.dim // 2)
    plans: list[shared.RunPlan] = []
    for seed in range(shape.seeds):
        plans.append((kind(split_seed=seed), shape, name, seed))
    return shared.compared(plans, COMPARED, relations)


def sorting_dual() -> Run:
    """Dual attention sorts six objects by an order learned from 2000 examples, with an encoder and a decoder.

    polyhead train sorting-dual.  1200 steps with batches of 64, about half a minute of one core.
    """
    return shared.single("sorting-dual", sorting("small"), "sorting-2000-dual-0")


# -------------------------------------------------------------------------------------------------- claims and drawing
def draw_sorting(study: Study) -> FigureOutcome:
    """Draw the share of whole orders right, by number of training sequences."""
    cells = study.cells("task", "examples", "model")
    figure = shared.by_examples(cells, "iid", "training sequences", 0.0)
    caption = f"Sequences sorted without a mistake, as a decoder writes them; {SEED_CAPTION}."
    cells = cells.droplevel("task").rename_axis(["sequences", "model"])
    columns = (("sorted", "iid", None), ("elements", "iid", "element_accuracy"), ("noisy objects", "novel", None))
    verdicts: list[Verdict] = []
    if is_complete_grid(cells):
        scores = score_table(cells, "iid")
        verdicts = shared.learns("sorting", scores)
        scores = scores.rename(index="n {}".format)
        verdicts += better("sorting", "abstractor", ("softmax", "dual"), scores)
        verdicts += operators("sorting", scores)
    rows, numbers = shared.table(cells, columns)
    return FigureOutcome([Picture("sorting", caption, figure)], rows, verdicts, shared.notes(cells), numbers)


def _claims(cells: Cells, subject: str) -> list[Verdict]:
    scores = score_table(cells, "compositional")
    verdicts = better(subject, "dual", ("softmax",), scores)
    verdicts += better(subject, "abstractor", ("softmax",), scores)
    verdicts += better(subject, "corelnet", ("dual",), scores)
    return verdicts + operators(subject, scores)


def draw_classified(study: Study, subject: str) -> FigureOutcome:
    """Draw a task that classifies objects; the task is the only condition."""
    columns = (("unseen", "compositional", None), ("validation", "validation", None))
    claim = partial(_claims, subject=subject)
    return shared.course(study, "task", columns, claim, lambda condition, model: "a plot")


FIGURES = {
    "sorting": Figure("Object sorting: learning curves", DUAL, draw_sorting, sorting, minutes=17.5),
    "order": Figure("Pairwise order", DUAL, partial(draw_classified, subject="pairwise order"), order, minutes=3.9),
    "set": Figure("SET", DUAL, partial(draw_classified, subject="SET"), set_cards, minutes=4.0),
}
