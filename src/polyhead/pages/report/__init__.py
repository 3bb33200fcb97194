"""The HTML report of finished runs.  Start with writer.py; runs.py, codes.py and attention.py compute its contents."""

from polyhead.spec.optional import optional

with optional("report", "polyhead[report]"):
    import plotly as _plotly  # noqa: F401

from polyhead.pages.report.writer import export, results_table, title, write

__all__ = ["export", "results_table", "title", "write"]
