"""The page on which one explores a text, token by token: writer.py begins, data.py holds the codes of all pairs."""

from polyhead.pages.explore.writer import explore, explore_folder, write

__all__ = ["explore", "explore_folder", "write"]


def __dir__() -> list[str]:
    return sorted(__all__)
