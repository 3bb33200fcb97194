"""The command line: verbs.py begins, a file for each larger verb, text.py prints."""

from polyhead.cli.verbs import main

__all__ = ["main"]


def __dir__() -> list[str]:
    return sorted(__all__)
