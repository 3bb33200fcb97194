"""The view of a value in a notebook: a small table."""

import html
from collections.abc import Mapping, Sequence


def as_table(title: str, rows: Mapping[str, object | Sequence[object]]) -> str:
    """An HTML table: a caption, and a row for each name with its value or values."""
    lines = [f"<table><caption>{html.escape(title)}</caption>"]
    for name, values in rows.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            values = [values]
        body = "".join(f'<td style="text-align:left">{html.escape(str(cell))}</td>' for cell in values)
        lines.append(f'<tr><th style="text-align:left">{html.escape(name)}</th>{body}</tr>')
    return "".join([*lines, "</table>"])
