"""Recipes: functions that return run configurations.  A sweep is a list of them, a figure is a function.

Each docstring gives the paper, the command, the minutes and the figure to expect.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from polyhead.config import Run, extensions
from polyhead.papers import demo
from polyhead.papers.dual import questions as dual_questions, runs as dual
from polyhead.papers.hyla import runs as hyla_figures, singles as hyla
from polyhead.papers.hyla.rows import row_of
from polyhead.papers.language import runs as lm
from polyhead.spec.shapes import one_of

HYLA: dict[str, Callable[[str], tuple[Run, ...]]] = {
    "fig-2b": hyla_figures.fig_codes,
    "fig-2c": hyla_figures.fig_2c,
    "fig-2d": hyla_figures.fig_codes,
    "fig-4a": hyla_figures.fig_4a,
    "fig-4a-heads": hyla_figures.fig_4a_heads,
    "fig-4b": hyla_figures.fig_4b,
    "fig-5a": hyla_figures.fig_5_codes,
    "fig-5b": hyla_figures.fig_5_codes,
    "fig-5c": hyla_figures.fig_5c,
    "fig-5d": hyla_figures.fig_5d,
    "fig-5e": hyla_figures.fig_5_codes,
    "fig-5f": hyla_figures.fig_5_codes,
    "fig-a2": hyla_figures.fig_codes,
    "fig-a3": hyla_figures.fig_2c,
    "fig-a4": hyla_figures.fig_a4,
    "fig-a5": hyla_figures.fig_a5,
    "fig-a6": hyla_figures.fig_5_codes,
    "fig-a7": hyla_figures.fig_a7,
    "fig-a8": hyla_figures.fig_5_codes,
    "table-a1": hyla_figures.table_a1,
    "table-a3": hyla_figures.table_a3,
}
"""The runs of a figure or table of Schug et al. 2024, by scale; `polyhead.papers.reproduce` draws them."""

DUAL: dict[str, Callable[[str], tuple[Run, ...]]] = {
    "games": dual.games,
    "sorting": dual.sorting,
    "order": dual.order,
    "set": dual.set_cards,
    "maths": dual.maths,
    "images": dual.images,
    "symbols": dual_questions.symbols,
    "split": dual_questions.split,
}
"""Those of the dual-attention study."""

LM: dict[str, Callable[[str], tuple[Run, ...]]] = {
    "lm-bytes": lm.lm_bytes,
    "lm-long": lm.lm_long,
    "fig-6": lm.fig_6,
    "dual-lm": lm.dual_lm,
    "swiglu": lm.swiglu,
    "norms": lm.norms,
}
"""Those of language models."""

STUDIES = HYLA | DUAL | LM
"""All that `polyhead reproduce` trains."""

SHORT = ("fig-2b", "fig-2c", "fig-2d", "fig-a2", "fig-a3", "table-a1", "table-a3")
"""Figures that have the scale `short`: they are about fuzzy logic, or a part of them is."""

SINGLE: dict[str, Callable[[str], Run]] = {
    "fuzzy-softmax": hyla.fuzzy_softmax,
    "fuzzy-linear": hyla.fuzzy_linear,
    "fuzzy-hyla": hyla.fuzzy_hyla,
}
"""Recipes of one run that take a scale, `short` without one."""

MINUTES: dict[str, float] = {
    "table-a1": 185.6,
    "table-a3": 38.0,
    "fig-4a": 50.4,
    "fig-4a-heads": 67.0,
    "fig-4b": 31.5,
    "fig-a4": 72.3,
    "fig-5c": 10.0,
    "fig-5d": 6.4,
    "fig-a5": 10.1,
    "fig-a7": 0.8,
    "games": 73.5,
    "images": 19.4,
    "sorting": 14.6,
    "order": 1.3,
    "set": 1.4,
    "maths": 76.4,
    "symbols": 43.3,
    "split": 14.8,
    "lm-bytes": 41.7,
    "lm-long": 37.3,
    "fig-6": 29.6,
    "swiglu": 12.9,
    "norms": 12.2,
    "dual-lm": 45.4,
    **dict.fromkeys(("fig-2c", "fig-a3"), 42.3),
    **dict.fromkeys(("fig-2b", "fig-2d", "fig-a2"), 8.4),
    **dict.fromkeys(("fig-5a", "fig-5b", "fig-5e", "fig-5f", "fig-a6", "fig-a8"), 5.8),
    "demo": 37.6,
    "games-dual": 0.25,
    "sorting-dual": 0.7,
    "maths-dual": 6.0,
    "digits-dual": 3.0,
}
"""Core minutes that the runs of a figure took at the small scale, one thread each, on a busy machine: see
docs/results; and those of single recipes.  What is not named was not measured."""

STEP = {"softmax": 41.0, "linear": 44.0, "hyla": 50.0}
"""Milliseconds that a step of 128 x 32 tokens takes at the paper's shape of fuzzy logic, on an idle core in float32;
of other lengths in proportion."""

FAMILIES = {"Attention as a hypernetwork": HYLA, "dual attention": DUAL, "language models": LM}
"""The studies by paper and kind."""

GPU_MINUTES = {"fuzzy_logic": "2-3", "sraven": "20-200", "fig-6": "72-100 hours on 16 TPU v5e"}
"""Of one run, on an RTX 3090 or 4090, by the paper's appendix D.1."""

Recipe = Callable[..., Run | tuple[Run, ...]]


class Recipes(dict[str, Recipe]):
    """Ours by name; those that others registered or declare are found, too."""

    def __missing__(self, name: str) -> Recipe:
        whole = every()
        return whole[one_of("recipes", "recipe", name, whole)]


def every() -> dict[str, Recipe]:
    """Our recipes, and those that others added."""
    return {**cast(dict[str, Recipe], extensions.added("recipes")), **RECIPES}


RECIPES = Recipes(
    {
        "demo": demo.demo,
        **SINGLE,
        "fuzzy-original": hyla.fuzzy_original,
        "sraven-softmax": hyla.sraven_softmax,
        "sraven-linear": hyla.sraven_linear,
        "sraven-hyla": hyla.sraven_hyla,
        "games-dual": dual.games_dual,
        "sorting-dual": dual.sorting_dual,
        "maths-dual": dual.maths_dual,
        "digits-dual": dual.digits_dual,
        **{f"lm-{row}": lm.single(row) for row in lm.ROWS},
        **STUDIES,
    }
)
"""Name on the command line -> recipe; those of figures take a scale, that of `default_scale` without one."""


def default_scale(figure: str) -> str:
    """`short` for what is about fuzzy logic alone, `small` for the others."""
    return "short" if figure in SHORT and not figure.startswith("table") else "small"


def short_minutes(name: str) -> float | None:
    """Core minutes of the runs of a recipe at the scale `short`, by steps; None where a model was not measured."""
    made = SINGLE[name]("short") if name in SINGLE else STUDIES[name]("short") if name in SHORT else ()
    runs = made if isinstance(made, tuple) else (made,)
    if not runs or any(row_of(run) not in STEP for run in runs):
        return None
    return sum(run.train.steps * STEP[row_of(run)] * run.task.length / 32 for run in runs) / 60_000


def paper_cost(name: str) -> str:
    """GPU minutes of one run of a figure by the paper, a range for each task; "" where the papers give no times."""
    if name not in HYLA:
        return GPU_MINUTES.get(name, "")
    return ", ".join(GPU_MINUTES[task] for task in dict.fromkeys(run.task.name for run in STUDIES[name]("paper")))


def reseeded(run: Run, by: int) -> Run:
    """`run` with its seed moved by `by`, in its name too if that ends with it: hyla-0 by 3 is hyla-3."""
    base, dash, end = run.name.rpartition("-")
    name = f"{base}{dash}{run.seed + by}" if dash and end == str(run.seed) else run.name
    return replace(run, name=name, seed=run.seed + by)
