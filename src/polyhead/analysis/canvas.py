"""Empty figures, their inks, and how figures become files and SVG text: equal figures give equal bytes, and small ones.

Every figure of the project is drawn once, with matplotlib.  `save` writes it as a file for papers; `svg` gives the text
that a page holds.
"""

import io
import pathlib
import re
from typing import TYPE_CHECKING, Literal

from polyhead.spec.optional import optional
from polyhead.spec.values import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Size = tuple[float, float]

INK = "#24292f"
FAINT = "#6e7781"
GRID = "#e4e7eb"
# Inks that follow the theme of a page: colour in a figure -> colour in the SVG of a page.
THEME = {INK: "var(--ink, #24292f)", FAINT: "var(--faint, #6e7781)", GRID: "var(--rule, #e4e7eb)"}
# Dots per inch of PNG files.
RESOLUTION = 200


# ------------------------------------------------------------------------------------------------------------- figures
def blank(width: float, height: float) -> "Figure":
    """An empty figure, in inches.  Raises MissingPackage without matplotlib."""
    with optional("figures", "polyhead[report]"):
        from matplotlib.figure import Figure  # without pyplot: no global state, no display
    return Figure(figsize=(width, height), layout="constrained")


def one_panel(width: float, height: float) -> tuple["Figure", "Axes"]:
    """A figure with a single panel, in inches."""
    figure = blank(width, height)
    axes = figure.add_subplot()
    plain(axes, "x")
    return figure, axes


def panel_grid(
    rows: int, columns: int, size: Size = (2.4, 2.3), *, sharex: bool = False, sharey: bool = False
) -> tuple["Figure", list["Axes"]]:
    """A figure, and its panels row by row.  `size`: width and height of a panel in inches."""
    figure = blank(size[0] * columns, size[1] * rows)
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey).flat)


def plain(axes: "Axes", grid_lines: Literal["both", "x", "y"]) -> None:
    """Two spines, and faint lines behind what is drawn."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(FAINT)
    axes.tick_params(which="both", colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(axis=grid_lines, color=GRID)
    axes.set_axisbelow(True)


# --------------------------------------------------------------------------------------------------------------- files
def save(figure: "Figure", *paths: str | pathlib.Path) -> pathlib.Path:
    """Write `figure` to each of `paths`, in the format of its suffix; returns the last path.

    Equal figures give equal files: no date, fixed SVG ids.

    Raises:
        ValueError: For a format that is not known.
    """
    for path in map(pathlib.Path, paths):
        kind = path.suffix.lstrip(".").lower() or "png"
        try:
            data = _rendered(figure, kind, salt="polyhead", facecolor="white")
        except ValueError as error:
            raise ValueError(f"figures: {path} cannot be written ({one_line(error)})") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return path


def svg(figure: "Figure", name: str) -> str:
    """The SVG element of `figure` for a page: text stays text, the background is the page's, inks follow its theme.

    Args:
        name: Differs from the names of the page's other figures, so that no two figures have an id in common.
    """
    text = _rendered(figure, "svg", salt=name, facecolor="none").decode()
    text = text[text.index("<svg") :]
    for useless in (r"<metadata>.*?</metadata>", r"<!--.*?-->", r"<defs>\s*<style.*?</style>\s*</defs>"):
        text = re.sub(useless, "", text, flags=re.DOTALL)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")
    return re.sub(r"<[^>]*>", _themed_tag, text)


def _themed_tag(tag: re.Match[str]) -> str:
    """A tag of an SVG in the form for a page: shorter, and with the theme's inks."""
    text = tag[0]
    text = re.sub(r' id="(image\w+|[a-zA-Z_.0-9]+_\d+)"', "", text)  # names to which nothing refers
    text = re.sub(r' xmlns(:xlink)?="[^"]*"| version="1.1"', "", text).replace("xlink:href", "href")
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # that of the page
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # a hundredth of a point is enough
    for colour, themed in THEME.items():
        text = text.replace(colour, themed)
    return text


def _rendered(figure: "Figure", kind: str, *, salt: str, facecolor: str) -> bytes:
    """The bytes of `figure` in the format `kind`."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names may be tokens of a text, such as "$$"
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # else two files would differ
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": salt, "svg.fonttype": "none", "image.composite_image": False}):
        figure.savefig(buffer, format=kind, dpi=RESOLUTION, metadata=metadata, facecolor=facecolor)
    return buffer.getvalue()
