"""Relational games: the task, its shapes, and the published files (original.py)."""
