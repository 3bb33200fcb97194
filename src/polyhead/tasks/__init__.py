"""Reasoning tasks: data, loss and metrics.  They know no network."""

from polyhead.config import Batch, Task
from polyhead.tasks.fuzzy_logic import FuzzyLogic
from polyhead.tasks.sraven import Sraven
from polyhead.tasks.task import Score

KINDS: tuple[type[Task], ...] = (FuzzyLogic, Sraven)
"""The classes that a configuration file may name as its task."""

__all__ = ["KINDS", "Batch", "FuzzyLogic", "Score", "Sraven"]
