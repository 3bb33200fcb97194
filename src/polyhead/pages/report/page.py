"""The page of a report: sections of HTML around the figures, and the one file that holds them, plotly.js included.

The file forbids itself every request (Content-Security-Policy), so it looks the same offline, in ten years.
"""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from polyhead.pages.report.figures import DARK, SCALES
from polyhead.pages.resources import resource

STEPS = 1000
"""Matrices in `looks` hold whole numbers, this one for their largest value."""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class Page:
    """HTML in order, the figures it refers to, and in `looks` the matrices that a reader chooses from."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self.sections: list[tuple[str, str]] = []
        self.looks: list[dict[str, Any]] = []

    def add(self, text: str) -> None:
        self.parts.append(text)

    def section(self, anchor: str, heading: str, link: str = "") -> None:
        self.sections.append((anchor, link or heading))
        self.add(f'<h2 id="{anchor}">{escape(heading)}</h2>')

    def plot(self, figure: go.Figure, caption: str, *, maps: Mapping[str, Any] | None = None) -> str:
        """The HTML of one figure; the page draws it.  `maps`: x and y by name, for the switch between t-SNE and PCA."""
        name = f"figure-{len(self.figures) + 1}"
        spec = json.loads(figure.to_json(validate=False))
        self.figures.append({"id": name, "maps": maps, "data": spec["data"], "layout": spec["layout"]})
        box = f'<div class="plot" id="{name}" style="height:{figure.layout.height}px" role="img"'
        return f'<figure>{box} aria-label="{escape(caption)}"></div><figcaption>{escape(caption)}</figcaption></figure>'

    def html(self, title: str, head: str) -> str:
        """The whole file; `head` comes before the links to the sections."""
        links = "".join(f'<a href="#{anchor}">{escape(heading)}</a>' for anchor, heading in self.sections)
        return "\n".join(
            [
                '<!doctype html><html lang="en"><head><meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
                f"<title>{escape(title)}</title><style>{resource('report/report.css')}</style></head><body>",
                f"<header>{head}<nav>{links}</nav></header><main>",
                *(
                    ["<noscript><p>The figures need JavaScript; tables and text do not.</p></noscript>"]
                    * bool(self.figures)
                ),
                *self.parts,
                "</main>",
                *([] if not self.figures else self._scripts()),
                "</body></html>",
            ]
        )

    def _scripts(self) -> list[str]:
        """plotly and the figures; a page without any needs neither."""
        held = {"dark": DARK, "scales": SCALES, "steps": STEPS, "figures": self.figures, "looks": self.looks}
        data = json.dumps(held, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return [
            f'<script type="application/json" id="figures">{data.replace("</", "<" + chr(92) + "/")}</script>',
            f"<script>{get_plotlyjs()}</script><script>{resource('report/report.js')}</script>",
        ]


def escape(text: object) -> str:
    return html.escape(str(text))


def swatch(colour: str, glyph: str) -> str:
    """A mark in the text, in the colour the figures give it; browsers before 2024 show the light theme's."""
    both = f"color:{colour};color:light-dark({colour},{DARK.get(colour, colour)})"
    return f'<span class="swatch" style="{both}" aria-hidden="true">{glyph}</span>'


def paragraphs(lines: Sequence[str], *, lead: bool = False) -> str:
    return "".join(f'<p class="lead">{escape(x)}</p>' if lead else f"<p>{escape(x)}</p>" for x in lines)


def bullets(lines: Sequence[str], kind: str = "") -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Rows are (class, cells), cells are HTML, the first names the row; on a phone every row becomes a card."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [f'<table class="cards"><thead><tr>{top}</tr></thead><tbody>']
    for kind, cells in rows:
        rest = "".join(
            f'<td data-label="{escape(label)}">{cell}</td>' for label, cell in zip(head[1:], cells[1:], strict=True)
        )
        lines.append(f'<tr class="{kind}"><th scope="row">{cells[0]}</th>{rest}</tr>')
    return "\n".join([*lines, "</tbody></table>"])


def facts(values: Mapping[str, object]) -> str:
    """A table of names and values."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def details(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
