"""Relational games: the task, its shapes, the published files (original.py), its baselines."""

from polyhead.tasks.relational_games.task import RelationalGames

__all__ = ["RelationalGames"]
