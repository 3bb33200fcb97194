"""A page: one HTML file with its style, scripts and data, which makes no requests.

So it also works offline.  Templates are Jinja2's and escape every string.  Data for scripts are JSON by `tojson`,
without any `<`, and scripts show them as text, never as HTML.
"""

import importlib.resources
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from polyhead.analysis import canvas
from polyhead.train.messages import escape
from polyhead.train.store.files import path_in_errors, write

# What a browser lets a page do: run its own scripts and show its own pictures, but ask nobody.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class HtmlPage:
    """A whole page, which a notebook shows by itself."""

    text: str

    def save(self, path: str | pathlib.Path, function: str) -> pathlib.Path:
        """Write the page and return its path; its folder is made.  A ValueError of one line begins with `function`."""
        path = pathlib.Path(path)
        try:
            with path_in_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write(path, self.text.encode(errors="backslashreplace"))  # names of folders need not be UTF-8
        except OSError as error:
            raise ValueError(f"{function}: {error.strerror}") from None
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of a notebook, apart from the notebook's own style and scripts."""
        frame = Markup('<iframe srcdoc="{}" sandbox="allow-scripts" style="width:100%;height:40rem;border:0"></iframe>')
        return str(frame.format(self.text))


def _without_controls(value: object) -> object:
    """Text with its control characters as escapes; Markup, which is ours, and other values as they are."""
    if type(value) is str:
        return escape(value)
    return value


@cache
def _templates() -> jinja2.Environment:
    """All templates of the package, by their paths in it."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("polyhead", ""),
        autoescape=True,
        finalize=_without_controls,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return templates


def render(template: str, values: Mapping[str, Any], *, title: str, style: str) -> HtmlPage:
    """The page of a template that extends "pages/page.html", such as "pages/report/report.html".

    Args:
        values: What the template itself reads.
        style: The file of its style in this folder, after the common style.
    """
    styles = Markup(resource("style.css") + resource(style))
    page = _templates().get_template(template)
    return HtmlPage(page.render(title=title, policy=Markup(POLICY), style=styles, **values))


def figure_as_svg(figure: Any, caption: str, name: str) -> Markup:
    """The element of a matplotlib figure with its caption: SVG in the inks of the page's theme; a wide figure scrolls.

    Args:
        name: Differs from the names of the page's other figures.
    """
    start = Markup('<svg role="img" aria-label="{}" ').format(caption)
    svg = Markup(canvas.svg(figure, name).replace("<svg ", start, 1))
    element = '<figure id="{}"><div class="scroll">{}</div><figcaption>{}</figcaption></figure>'
    return Markup(element).format(name, svg, caption)


def resource(name: str) -> str:
    """The text of a file in this folder, such as `report/report.css`."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
