"""Fuzzy logic: the task, and the scores of solvers that do not compose (floors.py, function_floors.py)."""

from polyhead.tasks.fuzzy_logic.task import FuzzyLogic

__all__ = ["FuzzyLogic"]
