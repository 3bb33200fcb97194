"""Character-level mathematics: the task, its questions (modules.py), its tokens and files (text.py)."""

from polyhead.tasks.maths.task import Maths

__all__ = ["Maths"]
