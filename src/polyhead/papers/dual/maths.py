"""Five modules of school mathematics at character level (Altabaa and Lafferty 2024; Abstractors)."""

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from polyhead.config import Run, Sinusoidal
from polyhead.papers.claims import Verdict
from polyhead.papers.dual.models import BY_OFFSET, DUAL, row_of
from polyhead.papers.dual.shared import WRITERS, better, course, is_scored, percent, run_of, short_name, single, written
from polyhead.papers.figure import Figure
from polyhead.papers.outcome import score_table
from polyhead.papers.sizes import SMOKE, Scale, size
from polyhead.tasks import Maths
from polyhead.tasks.maths.modules import MODULES

if TYPE_CHECKING:
    from pandas import Series

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

    polyhead reproduce maths.  Paper: 2 layers each of encoder and decoder, width 128, 8 heads (dual attention: 4 + 4 in
    both, softmax in cross-attention), relative symbols, sinusoidal positions, post-norm, ReLU, dropout 0.1, Adam, rate
    6e-4 without a schedule, 390,600 steps with 512 questions of all difficulties.  Small: width 64, 4 heads, pre-norm,
    800 steps with 32 easy questions, new in every batch, rate 3e-3.

    The papers score characters and give no extrapolation (their log has the interpolation set twice).  Our choice where
    they are silent [the alternative]: the Abstractor is the encoder, and its decoder is a transformer that reads only
    abstract states [objects as well].
    """
    shape = size(MATHS, scale)
    runs = []
    for seed, module in itertools.product(range(shape.seeds), MODULES):
        task = Maths(module, "mixed") if scale == "paper" else Maths(module, "easy", *EASY[module])
        for row, setting in itertools.product(WRITERS, shape.grid()):
            model = written(task, (task.source, task.question), row, shape, BY_OFFSET)
            runs.append(run_of(f"maths-{module}-{row}-{seed}", task, model, shape, setting))
    return tuple(runs)


def on_files(run: Run, task: Maths) -> Run:
    """`run` on published questions, with room for any of them: many easy ones there are longer than ours."""
    shape = next(shape for shape in MATHS.values() if shape.steps == run.train.steps)
    task = replace(task, question=Maths.question, answer=Maths.answer)
    return replace(run, task=task, model=written(task, (task.source, task.question), row_of(run), shape, BY_OFFSET))


def maths_dual() -> Run:
    """Dual attention differentiates polynomials at character level.

    polyhead train maths-dual.  2500 steps with batches of 32, about six minutes of one core.  Exact answers: 1.00 on
    questions like those in training, 0.44 on longer questions, 0.02 on larger numbers.
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


def _claims(cells: "Series") -> list[Verdict]:
    scores = score_table(cells, "iid").rename(index=short_name)
    verdicts = []
    for module in scores.index:
        verdicts += better(module, "dual", ("softmax",), scores.loc[[module]])
    verdicts += better("the five modules", "dual", ("softmax-rope",), scores)
    verdicts += better("the five modules", "dual", ("abstractor",), scores)
    extrapolation = {
        "compositional": "questions of more parts than in training",
        "novel": "larger numbers than in training",
    }
    for split, subject in extrapolation.items():
        if is_scored(cells, split):
            scores = score_table(cells, split).rename(index=short_name)
            verdicts += better(subject, "dual", ("softmax",), scores)
    return verdicts


# The paper's numbers are characters at interpolation.
draw = course(
    "module",
    (
        ("exact, interpolation", "iid", None),
        ("exact, more parts", "compositional", None),
        ("exact, larger numbers", "novel", None),
        ("characters, interpolation", "iid", "character_accuracy"),
    ),
    _claims,
    lambda condition, model: percent(PRINTED[condition[0]], model),
)

FIGURES = {"maths": Figure("Mathematics, character by character", DUAL, draw, maths, minutes=76.4)}
