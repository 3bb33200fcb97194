"""The command line.  Start with verbs.py; larger verbs have their own files; text.py prints tables."""

from polyhead.cli.verbs import main

__all__ = ["main"]


def __dir__() -> list[str]:
    return sorted(__all__)
