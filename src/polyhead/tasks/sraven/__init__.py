"""Symbolic Raven matrices: the task, its baselines, and instances with several answers (ambiguity.py)."""
