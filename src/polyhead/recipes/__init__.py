"""Recipes: functions that return run configurations.  A sweep is a list of them, a figure is a function.

Each docstring gives the paper, the command, the minutes and the figure to expect.
"""

from collections.abc import Callable

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
