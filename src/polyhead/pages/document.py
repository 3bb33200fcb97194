"""A page: one HTML file with its style, scripts and data, which makes no requests.

So it also works offline.  Data of runs and texts are JSON without any `<`.  Scripts show them as text, never as HTML.
"""

import html
import importlib.resources
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.train.store.files import named, write

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def document(
    title: str,
    body: Sequence[str],
    *,
    style: str,
    data: Mapping[str, Any] | None = None,
    numbers: str = "",
    scripts: Sequence[str] = (),
) -> str:
    """The whole HTML: the common style and `style`, `body`, then `data` by id as JSON, `numbers` and scripts."""
    held = {f'type="application/json" id="{name}"': _json(each) for name, each in (data or {}).items()}
    held |= {'type="text/plain" id="numbers"': numbers} if numbers else {}
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>{resource('style.css')}{resource(style)}</style></head><body>",
            *body,
            *(f"<script {kind}>{text}</script>" for kind, text in held.items()),
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>",
        ]
    )


def _json(held: Any) -> str:
    return json.dumps(held, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def resource(name: str) -> str:
    """The text of a file in this folder, such as `report/report.css`."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def save(who: str, path: pathlib.Path, page: str) -> None:
    """Write a page as a whole, or raise a ValueError; its folder is made."""
    try:
        with named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write(path, page.encode(errors="backslashreplace"))  # names of folders need not be UTF-8
    except OSError as error:
        raise ValueError(f"{who}: {error.strerror}") from None


def escape(text: object) -> str:
    return html.escape(str(text))


def paragraphs(lines: Sequence[str], kind: str = "") -> str:
    return "".join(f'<p class="{kind}">{escape(x)}</p>' if kind else f"<p>{escape(x)}</p>" for x in lines)


def bullets(lines: Sequence[str], kind: str = "") -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """An HTML table.  Rows are (class, cells); cells are HTML, the first is the row's name.  Phones show cards."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [f'<table class="cards"><thead><tr>{top}</tr></thead><tbody>']
    for kind, cells in rows:
        rest = "".join(
            f'<td data-label="{escape(label)}">{cell}</td>' for label, cell in zip(head[1:], cells[1:], strict=True)
        )
        lines.append(f'<tr class="{kind}"><th scope="row">{cells[0]}</th>{rest}</tr>')
    return "\n".join([*lines, "</tbody></table>"])


def facts(values: Mapping[str, object]) -> str:
    """An HTML table of names and values."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def details(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
