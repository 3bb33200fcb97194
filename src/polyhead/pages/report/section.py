"""A section of a report: a heading with text, figures and tables, which the template lays out."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from polyhead.analysis.claims import Estimate
from polyhead.pages.document import figure_as_svg
from polyhead.tasks.scores import Score
from polyhead.train.messages import print_notice
from polyhead.train.progress import wanted

# The names of its columns, and its rows; the first cell of a row is its name.
Table = tuple[list[str], list[list[str]]]


@dataclass
class Section:
    """A section of the page; `details` are figures that a reader opens, by their summaries."""

    anchor: str
    heading: str
    text: str = ""
    figures: list[Markup] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    note: str = ""
    details: list[tuple[str, list[Markup]]] = field(default_factory=list)


class Draft:
    """A report while it is made: its figures by name, each drawn once for the page and for files, and its notes."""

    def __init__(self, progress: bool) -> None:
        self.figures: dict[str, Any] = {}
        self.notes: list[str] = []
        self.has_progress = wanted(progress)

    def add(self, name: str, figure: Any, caption: str) -> Markup:
        """Keep a figure; returns its element in the page."""
        self.figures[name] = figure
        element = figure_as_svg(figure, caption, name)
        # Files take the layout of the page: to compute it again would double the time of a drawing.
        figure.set_layout_engine(None)
        return element

    def tell(self, line: str) -> None:
        """Print a line of progress."""
        if self.has_progress:
            print_notice(f"report: {line}")


def number(value: float | None, digits: int = 3) -> str:
    """A number as text: with a true minus sign, and a dash for a number that is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f}".replace("-", "−")


def with_error(score: Estimate | Score | None) -> str:
    """A mean with its standard error, without a line break between them; a dash for None."""
    if score is None:
        return "–"
    error = score.error if isinstance(score, Estimate) else score.standard_error
    if not math.isfinite(error):
        return number(score.mean)
    return f"{number(score.mean)}\u00a0±\u00a0{number(error)}"


def grouped_digits(value: float | None) -> str:
    """A whole number as text: "151,265"; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}"


def slug(label: str, *parts: object) -> str:
    """A name for a file and an element: letters, digits and hyphens."""
    text = "-".join(map(str, (label, *parts)))
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
