"""Symbolic Raven matrices: the task, its baselines, and instances with several answers (ambiguity.py)."""

from polyhead.tasks.sraven.task import Sraven

__all__ = ["Sraven"]
