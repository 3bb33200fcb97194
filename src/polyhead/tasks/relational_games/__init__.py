"""Relational games: the task, its shapes, the published files (original.py), its baselines."""
