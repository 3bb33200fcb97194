"""Empty figures, and how figures are saved: equal figures give equal files, and small ones."""

import io
import pathlib
from typing import TYPE_CHECKING, Literal

import numpy as np

from polyhead.spec.optional import optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Size = tuple[float, float]
INK = "#24292f"


def blank(width: float, height: float) -> "Figure":
    """An empty figure, in inches.  Raises MissingPackage without matplotlib."""
    with optional("figures", "polyhead[report]"):
        from matplotlib.figure import Figure  # without pyplot: no global state, no display
    return Figure(figsize=(width, height), layout="constrained")


def one(width: float, height: float) -> tuple["Figure", "Axes"]:
    """A figure with a single panel, in inches."""
    figure = blank(width, height)
    plain(axes := figure.add_subplot(), "x")
    return figure, axes


def plain(axes: "Axes", lines_along: Literal["both", "x", "y"]) -> None:
    """Two spines, and faint lines behind what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis=lines_along, color="#e4e7eb")
    axes.set_axisbelow(True)


def grid_of(rows: int, columns: int, size: Size = (2.4, 2.3), *, sharey: bool = False) -> tuple["Figure", list["Axes"]]:
    """A figure, and its panels row by row.  `size`: width and height of a panel in inches."""
    figure = blank(size[0] * columns, size[1] * rows)
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)


def save(figure: "Figure", path: str | pathlib.Path) -> pathlib.Path:
    """Save in the format of the suffix of `path`.  Equal figures give equal files: no date, fixed SVG ids."""
    from matplotlib import rc_context

    (path := pathlib.Path(path)).parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.lstrip(".").lower() or "png"
    metadata = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else {}
    try:
        with rc_context({"svg.hashsalt": "polyhead"}):
            figure.savefig(drawn := io.BytesIO(), format=kind, dpi=200, metadata=metadata, facecolor="white")
    except ValueError as error:
        raise ValueError(f"figures: {path} cannot be written ({' '.join(str(error).split())})") from None
    path.write_bytes(_fewer_colours(drawn.getvalue()) if kind == "png" else drawn.getvalue())
    return path


def _fewer_colours(png: bytes) -> bytes:
    """The same picture with a table of 256 colours, or itself if more than its smoothed edges would differ."""
    from PIL import Image, ImageChops  # matplotlib needs it, too

    whole = Image.open(io.BytesIO(png)).convert("RGB")
    picture = whole.quantize(256, dither=Image.Dither.NONE)
    if (np.asarray(ImageChops.difference(whole, picture.convert("RGB"))).max(-1) > 16).mean() > 0.03:
        return png  # for example an image in front of a matrix
    picture.save(out := io.BytesIO(), "PNG", optimize=True)
    return out.getvalue()
