"""Recipes: functions that return run configurations.  A sweep is a list of them, a figure is a function.

Each docstring gives the paper, the command, the time and the expected score.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

from polyhead import extensions
from polyhead.analysis.labels import with_field
from polyhead.config import Run
from polyhead.papers.dual import games, images, maths, objects
from polyhead.papers.hyla import codes, counts, fuzzy, runs, scaling, tables
from polyhead.papers.language import kinds, tokens
from polyhead.papers.language.models import ROWS
from polyhead.papers.outcome import Figure, Runs
from polyhead.spec.checked import LARGEST
from polyhead.spec.shapes import one_of

Recipe = Callable[..., Run | tuple[Run, ...]]

# Name on the command line -> figure. A new figure is a file and a line here.
FIGURES: dict[str, Figure] = {
    **dict(sorted((fuzzy.FIGURES | scaling.FIGURES | codes.FIGURES | tables.FIGURES | counts.FIGURES).items())),
    **games.FIGURES,
    **objects.FIGURES,
    **maths.FIGURES,
    **images.FIGURES,
    **kinds.FIGURES,
    **tokens.FIGURES,
}

# The runs of `polyhead reproduce`: name of a figure -> function from scale to runs.
STUDIES: dict[str, Runs] = {name: figure.runs for name, figure in FIGURES.items() if figure.runs is not None}

# Figures with the scale `short`: all or part of their runs are fuzzy logic.
SHORT = tuple(name for name, figure in FIGURES.items() if figure.short)

# Recipes of one run that take a scale; the default is `short`.
SINGLE: dict[str, Recipe] = {f"fuzzy-{row}": runs.fuzzy(row) for row in runs.MODELS}

# Measured core minutes of single recipes; those of figures are in `FIGURES`. Others were not measured.
MINUTES: dict[str, float] = {"games-dual": 0.25, "sorting-dual": 0.7, "maths-dual": 6.0, "digits-dual": 3.0}
MINUTES |= {"lm-softmax": 8.5, "lm-linear": 8.3, "lm-hyla": 8.9, "lm-dual": 10, "lm-disentangled": 15}


class Recipes(dict[str, Recipe]):
    """Recipes by name: ours, and those that users registered."""

    def __missing__(self, name: str) -> Recipe:
        recipes = extensions.with_added("recipes", self, "recipes")
        return recipes[one_of("recipes", "recipe", name, recipes)]


# Name on the command line -> recipe. A figure's recipe takes a scale; the default is `default_scale`.
RECIPES = Recipes(
    {
        **SINGLE,
        **{f"sraven-{row}": runs.sraven(row) for row in runs.MODELS},
        "games-dual": games.games_dual,
        "sorting-dual": objects.sorting_dual,
        "maths-dual": maths.maths_dual,
        "digits-dual": images.digits_dual,
        **{f"lm-{row}": kinds.single(row) for row in ROWS},
        **STUDIES,
    }
)


def default_scale(figure: str) -> str:
    """`short` for figures only about fuzzy logic, `small` for the others."""
    if figure in SHORT and not figure.startswith("table"):
        return "short"
    return "small"


def reseeded(run: Run, by: int) -> Run:
    """`run` with `by` added to its seed, and to its name if that ends with the seed: hyla-0 by 3 is hyla-3."""
    name = run.name
    if name.endswith(f"-{run.seed}"):
        name = f"{name.removesuffix(str(run.seed))}{run.seed + by}"
    return replace(run, name=name, seed=run.seed + by)


def for_seeds(runs: Iterable[Run], seeds: int) -> tuple[Run, ...]:
    """The runs of a figure for the seeds 0 to `seeds` - 1; name and split follow the seed, as in the recipes."""
    if not 1 <= seeds <= LARGEST:
        raise ValueError(f"reproduce: seeds must be from 1 to {LARGEST} but is {seeds}")
    first = [run for run in runs if run.seed == 0]
    of_seeds = []
    for seed, run in itertools.product(range(seeds), first):
        of_seeds.append(replace(reseeded(run, seed), task=with_field(run.task, "split_seed", seed)))
    return tuple(of_seeds)
