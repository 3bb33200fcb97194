"""Five modules of school mathematics at character level (Altabaa and Lafferty 2024; Abstractors)."""

import itertools
import math
from dataclasses import replace
from functools import partial

from polyhead.analysis.claims import Verdict
from polyhead.config import Run, Sinusoidal
from polyhead.papers.dual.models import BY_OFFSET, DUAL
from polyhead.papers.dual.shared import (
    WRITERS,
    RunPlan,
    better,
    compared,
    course,
    operators,
    percent,
    short_name,
    single,
)
from polyhead.papers.outcome import Cells, Figure, score_table
from polyhead.papers.sizes import SMOKE, Scale, size
from polyhead.tasks import Maths
from polyhead.tasks.maths.modules import MODULES

# ---------------------------------------------------------------------------------------------------------------- runs
# fmt: off
MATHS: dict[str, Scale] = {
    "paper": Scale(
        dim=128, hidden=256, layers=2, heads=8, head_dim=16, positions=Sinusoidal(), norm_order="post", act="relu",
        dropout=0.1,
        steps=390_600, batch_size=512, clip=None, betas=(0.9, 0.995), final=1.0,
        lrs=(6e-4,), decays=(0.0,), warmups=(0,), seeds=5, eval_batches=20,
    ),
    "small": Scale(
        dim=64, hidden=128, layers=2, heads=4, head_dim=16, positions=Sinusoidal(), act="relu",
        steps=800, batch_size=32, clip=1.0,
        lrs=(3e-3,), decays=(0.0,), warmups=(100,), seeds=3, eval_batches=16,
    ),
    "smoke": replace(SMOKE, layers=1, batch_size=4, positions=Sinusoidal(), act="relu"),
}
# fmt: on

# The most characters of an easy question and its answer, including extrapolation.
EASY = {
    "algebra__linear_1d": (40, 6),
    "algebra__sequence_next_term": (60, 8),
    "calculus__differentiate": (75, 30),
    "polynomials__add": (96, 20),
    "polynomials__expand": (40, 30),
}


def maths(scale: str = "small") -> tuple[Run, ...]:
    """Five modules of school mathematics at character level: interpolation and extrapolation.

    polyhead reproduce maths.  Small: easy questions, new in every batch.  The papers score characters and give no
    extrapolation.
    """
    shape = size(MATHS, scale)
    plans: list[RunPlan] = []
    for seed, module in itertools.product(range(shape.seeds), MODULES):
        task = Maths(module, "mixed") if scale == "paper" else Maths(module, "easy", *EASY[module])
        plans.append((task, shape, f"maths-{module}", seed))
    return compared(plans, (*WRITERS, "disentangled"), BY_OFFSET)


def maths_dual() -> Run:
    """Dual attention differentiates polynomials at character level.

    polyhead train maths-dual.  2500 steps with batches of 32, about six minutes of one core.
    """
    run = single("maths-dual", maths("small"), "maths-calculus__differentiate-dual-0")
    return replace(run, train=replace(run.train, steps=2500))


# -------------------------------------------------------------------------------------------------- claims and drawing
# Module -> model -> percentage of characters, interpolation, and its standard error where there is one: two layers
# each, softmax heads of 871 thousand parameters (width 144), dual attention 4 + 4 of 832 thousand; the authors' logs.
PRINTED: dict[str, dict[str, tuple[float, float]]] = {
    "algebra__linear_1d": {"softmax": (64.0, 1.5), "dual": (66.3, 1.7), "abstractor": (64.1, math.nan)},
    "algebra__sequence_next_term": {"softmax": (91.4, 0.2), "dual": (92.1, 0.4), "abstractor": (94.9, math.nan)},
    "calculus__differentiate": {"softmax": (99.9, math.nan), "dual": (100.0, math.nan), "abstractor": (99.9, math.nan)},
    "polynomials__add": {"softmax": (84.5, 0.3), "dual": (85.9, math.nan), "abstractor": (86.9, math.nan)},
    "polynomials__expand": {"softmax": (74.1, 0.6), "dual": (77.9, 0.1), "abstractor": (73.4, math.nan)},
}


def _claims(cells: Cells) -> list[Verdict]:
    scores = score_table(cells, "iid").rename(index=short_name)
    verdicts = []
    for module in scores.index:
        verdicts += better(module, "dual", ("softmax",), scores.loc[[module]])
    verdicts += better("the five modules", "dual", ("softmax-rope",), scores)
    verdicts += better("the five modules", "dual", ("abstractor",), scores)
    verdicts += operators("the five modules", scores)
    extrapolation = {
        "compositional": "questions of more parts than in training",
        "novel": "larger numbers than in training",
    }
    for split, subject in extrapolation.items():
        verdicts += better(subject, "dual", ("softmax",), score_table(cells, split).rename(index=short_name))
    return verdicts


# The paper's numbers are characters at interpolation.
draw = partial(
    course,
    axis="module",
    columns=(
        ("exact, interpolation", "iid", None),
        ("exact, more parts", "compositional", None),
        ("exact, larger numbers", "novel", None),
        ("characters, interpolation", "iid", "character_accuracy"),
    ),
    claim=_claims,
    printed=lambda condition, model: percent(PRINTED[condition[0]], model),
)

# Minutes of seeds 2 to 4: seeds 0 and 1 waited for other work.
FIGURES = {"maths": Figure("Mathematics, character by character", DUAL, draw, maths, minutes=111.3)}
