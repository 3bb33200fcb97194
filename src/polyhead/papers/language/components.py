"""Two design choices taught in courses: feed-forward layers with or without a gate, pre-norm or post-norm."""

import itertools
import math
from dataclasses import replace

from polyhead.analysis import figures
from polyhead.analysis.claims import Scores, Verdict, above
from polyhead.config import Rotary, Run
from polyhead.models.size import match, parameters
from polyhead.papers.language.models import CLOSE, LANGUAGE, SMOKE, LanguageScale, feedforward, model
from polyhead.papers.language.shared import GB, course, notes_of, one_text, run_of, table, trained
from polyhead.papers.outcome import SEED_CAPTION, Figure, FigureOutcome, Picture, Table, curves, scores_of
from polyhead.papers.sizes import size
from polyhead.papers.study import Study

# ---------------------------------------------------------------------------------------------------------------- runs
# fmt: off
PARTS: dict[str, LanguageScale] = {
    "paper": LanguageScale(
        dim=512, hidden=1344, layers=4, heads=16, head_dim=32, positions=Rotary(),
        data="hub:roneneldan/TinyStories", tokenizer="bpe:10000", limit=3 * GB, held_out=0.01,
        steps=20_000, batch_size=64, precision="bf16", clip=1.0, betas=(0.9, 0.95),
        lrs=(1e-3,), decays=(0.1,), warmups=(500,), seeds=3, eval_batches=32,
    ),
    "small": LanguageScale(
        dim=96, hidden=256, layers=4, heads=4, head_dim=24, positions=Rotary(),
        length=128,
        steps=500, batch_size=16, clip=1.0, betas=(0.9, 0.99),
        lrs=(4e-3,), decays=(0.1,), warmups=(30,), seeds=3, eval_batches=16, evaluations=4,
    ),
    "smoke": SMOKE,
}
# fmt: on

ACTS = ("swiglu", "silu", "relu")
ORDERS = ("pre", "post")
# Learning rates of `norms`.
RATES = {"paper": (3e-4, 1e-3, 3e-3, 1e-2), "small": (1e-3, 3e-3, 1e-2, 3e-2), "smoke": (1e-3, 1e-2)}


def swiglu(scale: str = "small") -> tuple[Run, ...]:
    """SwiGLU against feed-forward layers without a gate (SiLU, ReLU), at equal parameters.

    polyhead reproduce swiglu.  Paper scale is Stanford's CS336 on TinyStories; small: the standard library's bytes.
    """
    shape = size(PARTS, scale)
    gated = model("softmax", shape)
    models = {"swiglu": gated}
    for act in ACTS[1:]:
        plain = replace(gated, feedforward=feedforward(act, shape.hidden))
        models[act] = match(plain, parameters(gated), field="hidden", tolerance=CLOSE)
    return trained("parts", models, shape)


def norms(scale: str = "small") -> tuple[Run, ...]:
    """Pre-norm against post-norm, by learning rate.

    polyhead reproduce norms.  The models of `swiglu`, four rates, two seeds.
    """
    base = size(PARTS, scale)
    shape = replace(base, seeds=2, lrs=RATES[scale], steps=300 if scale == "small" else base.steps)
    models = {order: model("softmax", replace(shape, norm_order=order)) for order in ORDERS}
    runs = []
    for seed, setting, order in itertools.product(range(shape.seeds), shape.grid(), ORDERS):
        runs.append(run_of(f"norms-{order}-{setting.lr:g}-{seed}", models[order], shape, setting, seed))
    return tuple(runs)


# -------------------------------------------------------------------------------------------------------------- claims
def gated(scores: Scores) -> list[Verdict]:
    """Return the claim that SwiGLU is better than layers without a gate.  `scores`: by name of the activation."""
    if "SwiGLU" not in scores or len(scores) == 1:
        return []
    parts = {}
    for name, score in scores.items():
        if name != "SwiGLU":
            parts[f"{name} − SwiGLU"] = score - scores["SwiGLU"]
    return [above("SwiGLU is better than feed-forward layers without a gate at equal parameters", parts)]


def orders(scores: Table, validation: Table) -> list[Verdict]:
    """Return the claims that pre-norm is better at the best rate of each and at the highest rate.

    A row per rate, the columns "pre" and "post".  `validation` chooses the best rates for the reported `scores`.
    """
    scores = scores.reindex(columns=ORDERS).dropna()
    if scores.empty:
        return []

    # A diverged run is the last.
    ranks = validation.loc[scores.index].map(lambda estimate: estimate.mean).astype(float).fillna(math.inf)
    best = {order: scores.loc[ranks[order].idxmin(), order] for order in ORDERS}
    highest = max(scores.index)
    difference = scores.loc[highest, "post"] - scores.loc[highest, "pre"]
    return [
        above("pre-norm is better than post-norm, each at its best rate", {"post − pre": best["post"] - best["pre"]}),
        above("pre-norm bears a higher rate", {f"post − pre at rate {highest:g}": difference}),
    ]


# ------------------------------------------------------------------------------------------------------------- drawing
def draw_swiglu(study: Study) -> FigureOutcome:
    """Draw bits per byte by number of tokens, a line per activation of the feed-forward layers."""
    cells = study.cells("feedforward")
    is_same, text = one_text(study)
    by_name = {name: course(cell) for name, cell in cells.items()}
    figure = figures.lines([("", by_name, {})], x_label="million tokens", y_label="bits per byte", log_x=True)
    caption = f"Bits per byte on validation text in the course of training; {SEED_CAPTION}."
    rows, numbers = table(cells, "feed-forward layers", str)
    verdicts = gated(scores_of(cells, "iid")) if is_same else []
    return FigureOutcome([Picture(study.figure, caption, figure)], rows, verdicts, notes_of(cells, (), text), numbers)


def draw_norms(study: Study) -> FigureOutcome:
    """Draw the final bits per byte by learning rate, for pre-norm and post-norm."""
    cells = study.cells("lr", "norm order")
    is_same, text = one_text(study)
    scores = scores_of(cells, "iid")
    by_rate = curves(scores, lambda order: f"{order}-norm")
    figure = figures.lines([("", by_rate, {})], x_label="learning rate", y_label="bits per byte", log_x=True)
    caption = f"Bits per byte of held-out text at the end of training; {SEED_CAPTION}."
    rows, numbers = table(cells.swaplevel(), "norms", lambda condition: f"{condition[0]}-norm, rate {condition[1]:g}")
    verdicts: list[Verdict] = []
    if is_same:
        validation = cells.map(lambda cell: cell.validation)
        verdicts = orders(scores.unstack(sort=False), validation.unstack(sort=False))
    return FigureOutcome([Picture(study.figure, caption, figure)], rows, verdicts, notes_of(cells, (), text), numbers)


FIGURES = {
    "swiglu": Figure("Feed-forward layers with and without a gate", LANGUAGE, draw_swiglu, swiglu, minutes=12.9),
    "norms": Figure("Norms before and after", LANGUAGE, draw_norms, norms, minutes=12.2),
}
