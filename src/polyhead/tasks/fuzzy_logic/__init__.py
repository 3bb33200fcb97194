"""Fuzzy logic: the task, and the scores of solvers that do not compose (baselines.py, function_baselines.py)."""

from polyhead.tasks.fuzzy_logic.task import FuzzyLogic

__all__ = ["FuzzyLogic"]
