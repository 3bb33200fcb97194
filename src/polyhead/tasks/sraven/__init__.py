"""Symbolic Raven matrices: the task, its baselines, ambiguous instances (ambiguity.py), and counts.py."""
