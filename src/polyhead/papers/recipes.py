"""Recipes: functions that return run configurations.  A sweep is a list of them, a figure is a function.

Each docstring gives the paper, the command, the time and the expected score.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal, cast, overload

from polyhead.analysis.labels import with_field
from polyhead.config import Run, extensions
from polyhead.papers.dual import games, images, maths, objects, questions
from polyhead.papers.figure import Figure, Runs
from polyhead.papers.hyla import codes, counts, fuzzy, scaling, singles, tables
from polyhead.papers.hyla.rows import row_of
from polyhead.papers.language import components, kinds, tokens
from polyhead.papers.language.models import ROWS
from polyhead.spec.shapes import one_of

__all__ = [
    "FAMILIES",
    "FIGURES",
    "MINUTES",
    "RECIPES",
    "SHORT",
    "SINGLE",
    "STUDIES",
    "default_scale",
    "every",
    "for_seeds",
    "reseeded",
    "short_minutes",
]

FIGURES: dict[str, Figure] = {
    **dict(sorted((fuzzy.FIGURES | scaling.FIGURES | codes.FIGURES | tables.FIGURES | counts.FIGURES).items())),
    **games.FIGURES,
    **objects.FIGURES,
    **maths.FIGURES,
    **images.FIGURES,
    **questions.FIGURES,
    **kinds.FIGURES,
    **tokens.FIGURES,
    **components.FIGURES,
}
"""Name on the command line -> figure.  A new figure is a file and a line here."""

STUDIES: dict[str, Runs] = {name: figure.runs for name, figure in FIGURES.items() if figure.runs is not None}
"""The runs of `polyhead reproduce`: name of a figure -> function from scale to runs."""

SHORT = tuple(name for name, figure in FIGURES.items() if figure.short)
"""Figures with the scale `short`: all or part of their runs are fuzzy logic."""

SINGLE: dict[str, Callable[[str], Run]] = {
    "fuzzy-softmax": singles.fuzzy_softmax,
    "fuzzy-linear": singles.fuzzy_linear,
    "fuzzy-hyla": singles.fuzzy_hyla,
}
"""Recipes of one run that take a scale; the default is `short`."""

MINUTES: dict[str, float] = {
    **{name: figure.minutes for name, figure in FIGURES.items() if figure.minutes is not None},
    "games-dual": 0.25,
    "sorting-dual": 0.7,
    "maths-dual": 6.0,
    "digits-dual": 3.0,
}
"""Measured core minutes of a figure's runs at the small scale, and of single recipes.  Others were not measured."""

STEP = {"softmax": 41.0, "linear": 44.0, "hyla": 50.0}
"""Milliseconds per step of 128 x 32 tokens with the paper's network on fuzzy logic, on an idle core in float32;
proportional to the length."""

FAMILIES: dict[str, Mapping[str, Runs]] = {
    paper: {name: runs for name, runs in STUDIES.items() if FIGURES[name].paper.title == paper}
    for paper in dict.fromkeys(figure.paper.title for figure in FIGURES.values())
}
"""The studies by paper and kind."""

Recipe = Callable[..., Run | tuple[Run, ...]]

OneRun = Literal[
    "fuzzy-softmax", "fuzzy-linear", "fuzzy-hyla", "fuzzy-original", "sraven-softmax", "sraven-linear", "sraven-hyla",
    "games-dual", "sorting-dual", "maths-dual", "digits-dual", "lm-softmax", "lm-linear", "lm-hyla", "lm-dual",
    "lm-disentangled", "lm-abstractor-heads", "lm-mixture",
]  # fmt: skip
"""The recipes that make one run, not several: type checkers know `RECIPES["fuzzy-hyla"]()` as a `Run`."""


class Recipes(dict[str, Recipe]):
    """Recipes by name: ours, and those that users registered or that installed packages declare."""

    @overload
    def __getitem__(self, name: OneRun, /) -> Callable[..., Run]: ...

    @overload
    def __getitem__(self, name: str, /) -> Recipe: ...

    def __getitem__(self, name: str, /) -> Recipe:
        return super().__getitem__(name)

    def __missing__(self, name: str) -> Recipe:
        whole = every()
        return whole[one_of("recipes", "recipe", name, whole)]


def every() -> dict[str, Recipe]:
    """Our recipes and those of others."""
    return {**cast(dict[str, Recipe], extensions.added("recipes")), **RECIPES}


RECIPES = Recipes(
    {
        **SINGLE,
        "fuzzy-original": singles.fuzzy_original,
        "sraven-softmax": singles.sraven_softmax,
        "sraven-linear": singles.sraven_linear,
        "sraven-hyla": singles.sraven_hyla,
        "games-dual": games.games_dual,
        "sorting-dual": objects.sorting_dual,
        "maths-dual": maths.maths_dual,
        "digits-dual": images.digits_dual,
        **{f"lm-{row}": kinds.single(row) for row in ROWS},
        **STUDIES,
    }
)
"""Name on the command line -> recipe.  A figure's recipe takes a scale; the default is `default_scale`."""


def default_scale(figure: str) -> str:
    """`short` for figures only about fuzzy logic, `small` for the others."""
    return "short" if figure in SHORT and not figure.startswith("table") else "small"


def short_minutes(name: str) -> float | None:
    """Core minutes of a recipe's runs at the scale `short`, from their steps; None if a model was not measured."""
    made = SINGLE[name]("short") if name in SINGLE else STUDIES[name]("short") if name in SHORT else ()
    runs = made if isinstance(made, tuple) else (made,)
    if not runs or any(row_of(run) not in STEP for run in runs):
        return None
    return sum(run.train.steps * STEP[row_of(run)] * run.task.length / 32 for run in runs) / 60_000


def reseeded(run: Run, by: int) -> Run:
    """`run` with `by` added to its seed, and to its name if that ends with the seed: hyla-0 by 3 is hyla-3."""
    base, dash, end = run.name.rpartition("-")
    name = f"{base}{dash}{run.seed + by}" if dash and end == str(run.seed) else run.name
    return replace(run, name=name, seed=run.seed + by)


def for_seeds(runs: Iterable[Run], seeds: int) -> tuple[Run, ...]:
    """The runs of a figure for the seeds 0 to `seeds` - 1; name and split follow the seed, as in the recipes."""
    if seeds < 1:
        raise ValueError(f"reproduce: seeds must be at least 1 but is {seeds}")
    made = [reseeded(run, seed) for seed, run in itertools.product(range(seeds), runs) if run.seed == 0]
    return tuple(replace(run, task=with_field(run.task, "split_seed", run.seed)) for run in made)
