"""The HTML report of finished runs.  Start with writer.py; runs.py reads runs, codes.py and attention.py analyse."""

from polyhead.pages.report.writer import page, write

__all__ = ["page", "write"]
