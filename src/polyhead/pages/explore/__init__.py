"""The page for exploring a text token by token.  Start with writer.py; data.py has the codes of all pairs."""

from polyhead.pages.explore.writer import explore, explore_folder, taps_page, write

__all__ = ["explore", "explore_folder", "taps_page", "write"]
