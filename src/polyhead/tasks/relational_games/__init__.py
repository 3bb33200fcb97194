"""Relational games: the task and its shapes."""
