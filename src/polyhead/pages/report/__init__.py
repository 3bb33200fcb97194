"""The HTML report of finished runs: writer.py begins; runs.py, codes.py and attention.py compute what it shows."""

from polyhead.pages.report.writer import export, results_table, write

__all__ = ["export", "results_table", "write"]
