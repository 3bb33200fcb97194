"""Relational games: the task, its shapes, the published files (original.py), its floors."""

from polyhead.tasks.relational_games.task import RelationalGames

__all__ = ["RelationalGames"]
