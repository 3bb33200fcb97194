"""Recipes: functions that return run configurations.  A sweep is a list of them, a figure is a function.

Each docstring gives the paper, the command, the minutes and the figure to expect.
"""

from collections.abc import Callable
from dataclasses import replace

from polyhead.config import Run
from polyhead.recipes import hyla

RECIPES: dict[str, Callable[[], Run | tuple[Run, ...]]] = {
    "demo": hyla.demo,
    "fuzzy-softmax": hyla.fuzzy_softmax,
    "fuzzy-linear": hyla.fuzzy_linear,
    "fuzzy-hyla": hyla.fuzzy_hyla,
    "fuzzy-original": hyla.fuzzy_original,
}
"""Name on the command line -> recipe."""


def reseeded(run: Run, by: int) -> Run:
    """`run` with its seed moved by `by`, in its name too if that ends with it: hyla-0 by 3 is hyla-3."""
    base, dash, end = run.name.rpartition("-")
    name = f"{base}{dash}{run.seed + by}" if dash and end == str(run.seed) else run.name
    return replace(run, name=name, seed=run.seed + by)
