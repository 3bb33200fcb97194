"""Symbolic Raven matrices: the task, its floors, and how often an instance has several answers (ambiguity.py)."""

from polyhead.tasks.sraven.task import Sraven

__all__ = ["Sraven"]


def __dir__() -> list[str]:
    return sorted(__all__)
