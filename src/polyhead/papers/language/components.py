"""Two design choices taught in courses: feed-forward layers with or without a gate, pre-norm or post-norm."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from polyhead.analysis import figures
from polyhead.config import Rotary, Run
from polyhead.models.size import match, parameters
from polyhead.papers.claims import Estimate, Scores, Verdict, above
from polyhead.papers.figure import Figure
from polyhead.papers.language.models import CLOSE, LANGUAGE, SMOKE, LanguageScale, feedforward, model
from polyhead.papers.language.shared import GB, course, one_text, run_of, table
from polyhead.papers.outcome import SEED_CAPTION, FigureOutcome, Panel, Picture, scores_by_model
from polyhead.papers.sizes import size
from polyhead.papers.study import Study

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
RATES = {"paper": (3e-4, 1e-3, 3e-3, 1e-2), "small": (1e-3, 3e-3, 1e-2, 3e-2), "smoke": (1e-3, 1e-2)}
"""Learning rates of `norms`."""


def swiglu(scale: str = "small") -> tuple[Run, ...]:
    """SwiGLU against feed-forward layers without a gate (SiLU, ReLU), at equal parameters.

    polyhead reproduce swiglu.  Paper scale is Stanford's CS336: TinyStories with 10,000 BPE tokens, 4 layers of width
    512, 16 heads, 256-token sequences, 328 M tokens.  Small: the standard library's bytes, width 96, 4 layers, 1 MB,
    three seeds.
    """
    shape = size(PARTS, scale)
    gated = model("softmax", shape)
    models = {"swiglu": gated}
    for act in ACTS[1:]:
        plain = replace(gated, feedforward=feedforward(act, shape.hidden))
        models[act] = match(plain, parameters(gated), field="hidden", tolerance=CLOSE)
    every = itertools.product(range(shape.seeds), shape.grid(), ACTS)
    return tuple(run_of(f"parts-{act}-{seed}", models[act], shape, setting, seed) for seed, setting, act in every)


def norms(scale: str = "small") -> tuple[Run, ...]:
    """Pre-norm against post-norm, by learning rate.

    polyhead reproduce norms.  The models of `swiglu`, four rates over a factor of 30, two seeds; small: 300 updates.
    """
    base = size(PARTS, scale)
    shape = replace(base, seeds=2, lrs=RATES[scale], steps=300 if scale == "small" else base.steps)
    models = {order: model("softmax", replace(shape, norm_order=order)) for order in ORDERS}
    every = itertools.product(range(shape.seeds), shape.grid(), ORDERS)
    return tuple(
        run_of(f"norms-{order}-{setting.lr:g}-{seed}", models[order], shape, setting, seed)
        for seed, setting, order in every
    )


# --------------------------------------------------------------------------------------------------------------- claims
def gated(scores: Scores) -> list[Verdict]:
    """Return the claim that SwiGLU is better than layers without a gate.  `scores`: by name of the activation."""
    if "SwiGLU" not in scores or len(scores) == 1:
        return []
    parts = {f"{name} − SwiGLU": score - scores["SwiGLU"] for name, score in scores.items() if name != "SwiGLU"}
    return [above("SwiGLU is better than feed-forward layers without a gate at equal parameters", parts)]


def orders(scores: Mapping[float, Scores], validation: Mapping[float, Scores]) -> list[Verdict]:
    """Return the claims that pre-norm is better at the best rate of each and at the highest rate.

    `scores[rate]["pre"]`: the reported scores; those of `validation` choose the best rates.
    """
    rates = [rate for rate, by_order in scores.items() if set(ORDERS) <= set(by_order)]
    if not rates:
        return []

    def validation_score(rate: float, order: str) -> float:
        mean = validation[rate][order].mean
        return math.inf if math.isnan(mean) else mean  # a diverged run is the last

    best = {}
    for order in ORDERS:
        best_rate = min(rates, key=lambda rate, order=order: validation_score(rate, order))  # type: ignore[misc]
        best[order] = scores[best_rate][order]
    highest = max(rates)
    difference = scores[highest]["post"] - scores[highest]["pre"]
    return [
        above("pre-norm is better than post-norm, each at its best rate", {"post − pre": best["post"] - best["pre"]}),
        above("pre-norm bears a higher rate", {f"post − pre at rate {highest:g}": difference}),
    ]


# -------------------------------------------------------------------------------------------------------------- drawing
def draw_swiglu(study: Study) -> FigureOutcome:
    """Draw bits per byte by number of tokens, a line per activation of the feed-forward layers."""
    cells = {condition[0]: cell for condition, cell in study.cells("feedforward").items()}
    same, text = one_text(study)
    panel: Panel = ("", {name: course(cell) for name, cell in cells.items()}, {})
    figure = figures.lines([panel], x_label="million tokens", y_label="bits per byte", log_x=True)
    caption = f"Bits per byte on validation text in the course of training; {SEED_CAPTION}."
    return replace(
        table({name: (name, cell) for name, cell in cells.items()}, "feed-forward layers", (text,)),
        pictures=(Picture(study.figure, caption, figure),),
        verdicts=tuple(gated(scores_by_model(cells, "iid"))) if same else (),
    )


def draw_norms(study: Study) -> FigureOutcome:
    """Draw the final bits per byte by learning rate, for pre-norm and post-norm."""
    cells = {(order, rate): cell for (order, rate), cell in study.cells("norm order", "lr").items()}
    same, text = one_text(study)
    ends: dict[float, dict[str, Estimate]] = {}
    held: dict[float, dict[str, Estimate]] = {}
    series: dict[str, dict[float, list[float]]] = {}
    for (order, rate), cell in cells.items():
        ends.setdefault(rate, {})[order] = cell.score("iid")
        held.setdefault(rate, {})[order] = cell.validation
        series.setdefault(f"{order}-norm", {})[rate] = list(cell.score("iid").values.values())
    figure = figures.lines([("", series, {})], x_label="learning rate", y_label="bits per byte", log_x=True)
    caption = f"Bits per byte of held-out text at the end of training; {SEED_CAPTION}."
    named = {condition: (f"{condition[0]}-norm, rate {condition[1]:g}", cell) for condition, cell in cells.items()}
    return replace(
        table(named, "norms", (text,)),
        pictures=(Picture(study.figure, caption, figure),),
        verdicts=tuple(orders(ends, held)) if same else (),
    )


FIGURES = {
    "swiglu": Figure("Feed-forward layers with and without a gate", LANGUAGE, draw_swiglu, swiglu, minutes=12.9),
    "norms": Figure("Norms before and after", LANGUAGE, draw_norms, norms, minutes=12.2),
}
