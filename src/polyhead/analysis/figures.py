"""Still figures (PNG, SVG, PDF) for papers and pages, by matplotlib: results beside their floors, and maps of codes.

They draw what they are given and compute nothing: pass measured values.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

Array = np.ndarray
INK, FAINT = "#24292f", "#6e7781"
COLOURS = {"Softmax": "#0072b2", "Linear": "#d98c00", "HYLA": "#009e73"}
SPARE = ("#cc5f9f", "#d55e00", "#56a5d9", "#8a6fc4")
MARKERS = ("o", "s", "D", "^", "P", "v", "*")
MARKS = {"HYLA": "o", "Softmax": "s", "Linear": "D"}  # as in the report
LINES = {"Gaussian process": "--", "Exact ceiling": ":"}


def results(
    measured: Mapping[str, Sequence[float]],
    path: str | pathlib.Path,
    *,
    errors: Mapping[str, float] | None = None,
    floors: Mapping[str, float] | None = None,
    metric: str = "R²",
    title: str = "",
) -> pathlib.Path:
    """One row per mechanism: a dot per seed and their mean, best on top; floors and ceiling are vertical lines.

    `measured`: label -> the scores of its seeds.  `errors`: label -> standard error, drawn as given; otherwise that
    over seeds is drawn where there are several.  `floors`: name -> score ("Gaussian process" dashed, "Exact ceiling"
    dotted).

    >>> results({"HYLA": [0.76, 0.78], "Softmax": [0.71, 0.69]}, "results.svg", floors={"Gaussian process": 0.78})
    """
    if not measured or not all(len(values) for values in measured.values()):
        raise ValueError("results: every mechanism needs at least one measured score")
    order = sorted(measured, key=lambda label: float(np.mean(measured[label])))
    figure, axes = _axes(6.4, 1.1 + 0.42 * len(order))
    for name, value in (floors or {}).items():
        axes.axvline(value, color=FAINT, lw=1.2, ls=LINES.get(name, "-."), zorder=1)
        axes.annotate(name, (value, 1.0), (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points")
    for row, label in enumerate(order):
        values, (colour, marker) = np.asarray(measured[label], float), _style(label, list(measured))
        error = (errors or {}).get(label, values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0)
        axes.errorbar(values.mean(), row, xerr=error, fmt=marker, color=colour, ms=8, capsize=3, zorder=3)
        if len(values) > 1:
            axes.scatter(values, np.full(len(values), row), s=12, color=colour, alpha=0.6, zorder=2, linewidths=0)
    axes.set_yticks(range(len(order)), [f"{name} (n = {len(measured[name])})" for name in order])
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_xlabel(f"{metric} on unseen combinations" + (f"\n{title}" if title else ""))
    for text in axes.texts:
        text.set(ha="center", fontsize=8, color=FAINT)
    return _save(figure, path)


def code_maps(
    panels: Sequence[tuple[str, Float[Array, "b 2"], Float[Array, " b"] | Int[Array, " b"]]],
    path: str | pathlib.Path,
    *,
    columns: int = 4,
) -> pathlib.Path:
    """Maps of codes side by side: (title, points, values).  Whole values are classes, others a scale.

    >>> code_maps([("by target", embed(codes), targets), ("by term 1", embed(codes), terms[:, 0])], "codes.png")
    """
    if not panels:
        raise ValueError("code_maps: at least one panel was wanted but none came")
    rows = -(-len(panels) // columns)
    figure, grid = _grid(rows, min(columns, len(panels)))
    for axes, (title, points, values) in zip(grid, panels, strict=False):
        if np.issubdtype(values.dtype, np.integer):
            _classes(axes, points, values)
        else:
            dots = axes.scatter(points[:, 0], points[:, 1], c=values, s=7, cmap="cividis", linewidths=0)
            bar = figure.colorbar(dots, ax=axes, fraction=0.05, pad=0.02)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=7)
        axes.set_title(title, fontsize=9, color=INK)
    for axes in grid:
        axes.set_axis_off()
    return _save(figure, path)


def _classes(axes: Any, points: Array, values: Array) -> None:
    """Six colours times seven markers: no class rests on colour alone."""
    colours = (*COLOURS.values(), *SPARE[:3])
    for value in np.unique(values):
        mine = points[values == value]
        marker = MARKERS[int(value) // len(colours) % len(MARKERS)]
        axes.scatter(mine[:, 0], mine[:, 1], s=9, color=colours[int(value) % len(colours)], marker=marker, linewidths=0)


def _style(label: str, labels: Sequence[str]) -> tuple[str, str]:
    place = labels.index(label)
    return COLOURS.get(label, SPARE[place % len(SPARE)]), MARKS.get(label, MARKERS[place % len(MARKERS)])


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="x", color="#e4e7eb")
    axes.set_axisbelow(True)
    return figure, axes


def _grid(rows: int, columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 * columns, 2.3 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _save(figure: Any, path: str | pathlib.Path) -> pathlib.Path:
    """By the ending of `path`.  Equal figures give equal files: no date, and fixed ids in SVG."""
    from matplotlib import rc_context

    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.lstrip(".").lower() or "png"
    metadata = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else {}
    try:
        with rc_context({"svg.hashsalt": "polyhead"}):
            figure.savefig(path, format=kind, dpi=200, metadata=metadata, facecolor="white")
    except ValueError as error:
        raise ValueError(f"figures: {path} cannot be written ({' '.join(str(error).split())})") from None
    return path
