"""The HTML of a report: sections around the figures, with plotly.js included."""

import json
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from polyhead.pages.document import document, escape, resource
from polyhead.pages.report.figures import DARK, SCALES

STEPS = 1000
"""Matrices in `looks` are integers; the largest value of a kind is this one."""


class Page:
    """The page's HTML in order, its figures, and in `looks` the matrices that a reader can choose."""

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
        """The HTML of one figure; the page's script draws it.  `maps`: x and y by method, to switch t-SNE and PCA."""
        name = f"figure-{len(self.figures) + 1}"
        spec = json.loads(figure.to_json(validate=False))
        self.figures.append({"id": name, "maps": maps, "data": spec["data"], "layout": spec["layout"]})
        box = f'<div class="plot" id="{name}" style="height:{figure.layout.height}px" role="img"'
        return f'<figure>{box} aria-label="{escape(caption)}"></div><figcaption>{escape(caption)}</figcaption></figure>'

    def html(self, title: str, head: str) -> str:
        """The whole HTML; `head` comes before the links to the sections.  Without figures it has no script."""
        links = "".join(f'<a href="#{anchor}">{escape(heading)}</a>' for anchor, heading in self.sections)
        body = [f"<header>{head}<nav>{links}</nav></header><main>", *self.parts, "</main>"]
        if not self.figures:
            return document(title, body, style="report/report.css")
        body.insert(1, "<noscript><p>The figures need JavaScript; tables and text do not.</p></noscript>")
        held = {"dark": DARK, "scales": SCALES, "steps": STEPS, "figures": self.figures, "looks": self.looks}
        scripts = [get_plotlyjs(), resource("report/report.js")]
        return document(title, body, style="report/report.css", data={"figures": held}, scripts=scripts)


def swatch(colour: str, glyph: str) -> str:
    """A mark in the text with the colour of the figures; browsers before 2024 show the light theme's colour."""
    both = f"color:{colour};color:light-dark({colour},{DARK.get(colour, colour)})"
    return f'<span class="swatch" style="{both}" aria-hidden="true">{glyph}</span>'
