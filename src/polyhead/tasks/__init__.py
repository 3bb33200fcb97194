"""Reasoning tasks: data, loss and metrics.  They know no network."""

from polyhead.config import Batch, Task
from polyhead.tasks.fuzzy_logic import FuzzyLogic
from polyhead.tasks.relational_games import RelationalGames
from polyhead.tasks.sraven import Sraven
from polyhead.tasks.task import Score

KINDS: tuple[type[Task], ...] = (FuzzyLogic, Sraven, RelationalGames)
"""The classes that a configuration file may name as its task."""

__all__ = ["KINDS", "Batch", "FuzzyLogic", "RelationalGames", "Score", "Sraven"]
