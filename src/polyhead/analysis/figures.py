"""Static figures (PNG, SVG, PDF) for papers and pages, with matplotlib.

results(measured, path)      one row per mechanism, with floors and ceiling
lines(panels, path)          scores along an axis (examples, heads, steps, ...), with standard errors over seeds
heat(panels, path)           matrices with named rows and columns: similarities, codes, drops of zeroed heads
code_maps(panels, path)      two-dimensional maps of codes

They take measured values, and compute only means and standard errors.
"""

import pathlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from polyhead.analysis.canvas import INK, grid_of, one, plain, save
from polyhead.spec.lazy import own_names

__dir__ = own_names(__name__, "COLOURS", "DASHES", "LINES", "MARKERS", "MARKS", "UNTRAINED")

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray
FAINT = "#6e7781"
COLOURS = {"Softmax": "#0072b2", "Linear": "#d98c00", "HYLA": "#009e73"}
SPARE = (
    "#cc5f9f", "#d55e00", "#56a5d9", "#8a6fc4", "#7a4b2a", "#24292f", "#8f9a00", "#a8123e", "#12d6c5", "#5b3a8c",
    "#2e5e3e", "#f4978e",
)  # fmt: skip
MARKERS = ("o", "s", "D", "^", "P", "v", "*")
MARKS = {"HYLA": "o", "Softmax": "s", "Linear": "D"}  # the same as in the report
LINES = {"Gaussian process": "--", "Exact ceiling": ":", "Mixture": "-"}
DASHES = ("-.", (0, (3, 5)), (0, (6, 2, 1, 2, 1, 2)), (0, (8, 3)))  # none is like those of LINES
UNTRAINED = ", untrained"  # a label with this end looks like the label without it, but dashed, with hollow marks
Number = int | float
Series = Mapping[str, Mapping[Number, Sequence[Number]]]
Level = Number | Mapping[Number, Number]
Levels = Mapping[str, Level]


def results(
    measured: Mapping[str, Sequence[float]],
    path: str | pathlib.Path,
    *,
    errors: Mapping[str, float] | None = None,
    floors: Mapping[str, float] | None = None,
    printed: Mapping[str, tuple[float, float, int]] | None = None,
    metric: str = "R²",
    title: str = "",
    score: str = "",
) -> pathlib.Path:
    """One row per mechanism, best first: a dot per seed, and the mean.  Floors and ceiling are vertical lines.

    `measured`: label -> the scores of its seeds.  `errors`: label -> standard error; by default the standard error over
    several seeds.  `floors`: name -> score ("Gaussian process" is dashed, "Exact ceiling" dotted).  `printed`: label ->
    mean, standard error and number of seeds in a paper: a hollow mark in a row below.  `score`: the whole label of the
    axis, for another split.

    >>> results({"HYLA": [0.76, 0.78], "Softmax": [0.71, 0.69]}, "results.svg", floors={"Gaussian process": 0.78})
    """
    if not measured or not all(len(values) for values in measured.values()):
        raise ValueError("results: every mechanism needs at least one measured score")
    order = sorted(measured, key=lambda label: float(np.mean(measured[label])))
    figure, axes = one(6.4, 1.1 + 0.42 * (len(order) + len(printed or {})))
    for name, value in (floors or {}).items():
        axes.axvline(value, color=FAINT, lw=1.2, ls=LINES.get(name, "-."), zorder=1)
    places = [(label, own) for label in order for own in (False, True) if own or label in (printed or {})]
    names = []
    for row, (label, own) in enumerate(places):
        colour, marker = _style(label, list(measured))
        values = np.asarray(measured[label], float)
        usual = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        mean, error, count = values.mean(), (errors or {}).get(label, usual), len(values)
        if not own:
            mean, error, count = (printed or {})[label]
        fill = colour if own else "white"
        axes.errorbar(mean, row, xerr=error, fmt=marker, color=colour, mfc=fill, ms=8, capsize=3, zorder=3)
        if own and count > 1:
            axes.scatter(values, np.full(count, row), s=12, color=colour, alpha=0.6, zorder=2, linewidths=0)
        names.append(f"{label}{'' if own else ', the paper'} (n = {count})")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel((score or f"{metric} on unseen combinations") + (f"\n{title}" if title else ""))
    _name_floors(axes, floors or {})
    return save(figure, path)


def lines(
    panels: Sequence[tuple[str, Series, Levels]],
    path: str | pathlib.Path,
    *,
    x_label: str | Sequence[str],
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
    limits: tuple[Number | None, Number | None] = (None, None),
    columns: int = 3,
) -> pathlib.Path:
    """Panels side by side: (title, series, floors).  They share the y axis and the legend.

    A series is {x: scores of the seeds}: a line through the means, and for several seeds the standard error and a dot
    per seed.  A floor (or ceiling) is a number, a horizontal line, or {x: number}, a step around each x.  `limits`: of
    the y axis; a limit that is None, or that would hide a score, is chosen from the values.  `x_label`: one for all
    panels, or one for each.

    >>> held_out = {"HYLA": {16: [0.61, 0.66], 32: [0.79, 0.76]}, "Softmax": {16: [0.5, 0.4], 32: [0.6, 0.7]}}
    >>> floors = {"Gaussian process": {16: 0.50, 32: 0.79}, "Exact ceiling": 1.0}
    >>> lines([("70 % held out", held_out, floors)], "2c.svg", x_label="examples", y_label="R²", log_x=True)
    """
    if not panels or not all(series and all(series.values()) for _, series, _ in panels):
        raise ValueError("lines: every panel needs at least one series with at least one measured point")
    if not all(len(values) for _, series, _ in panels for points in series.values() for values in points.values()):
        raise ValueError("lines: every point needs at least one measured score")
    labels, names = (list(dict.fromkeys(name for panel in panels for name in panel[place])) for place in (1, 2))
    rows, columns = -(-len(panels) // columns), min(columns, len(panels))
    figure, grid = grid_of(rows, columns, (3.0 if columns > 1 else 4.4, 2.9), sharey=True)
    for i, (axes, (title, series, floors)) in enumerate(zip(grid, panels, strict=False)):
        plain(axes, "both")
        xs = sorted({x for points in series.values() for x in points})
        if log_x:
            _logarithmic(axes, xs)
        for label, points in series.items():
            _line(axes, points, label, _style(label, labels))
        for name, level in floors.items():
            _level(axes, level, xs, name, names, log_x)
        _ticks(axes, xs, log_x)
        axes.set_title(title, fontsize=9, color=INK)
        axes.set_xlabel(x_label if isinstance(x_label, str) else x_label[i], fontsize=9)
    grid[0].set_yscale("log" if log_y else "linear")
    grid[0].set_ylim(*_hiding_nothing(limits, panels))
    for axes in grid[::columns]:
        axes.set_ylabel(y_label, fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _legend(figure, grid[: len(panels)], [*labels, *names], columns)
    return save(figure, path)


def _ticks(axes: "Axes", xs: Sequence[Number], log_x: bool) -> None:
    """A number at each x where there are few, otherwise few enough numbers not to overlap."""
    if len(xs) <= 8:
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.minorticks_off()
    elif not log_x:
        axes.locator_params(axis="x", nbins=5)


def _hiding_nothing(
    limits: tuple[Number | None, Number | None], panels: Sequence[tuple[str, Series, Levels]]
) -> tuple[Number | None, Number | None]:
    """The limits, with None in place of one that would hide a score."""
    points = [points for _, series, _ in panels for points in series.values()]
    scores = np.concatenate([np.asarray(values, float) for each in points for values in each.values()])
    low, high = limits
    low = None if low is None or (scores < low).any() else low
    return low, None if high is None or (scores > high).any() else high


def _logarithmic(axes: "Axes", xs: Sequence[Number]) -> None:
    axes.set_xscale("log", subs=(2, 5) if max(xs) < 100 * min(xs) else ())  # few decades: room for labels
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    if len(xs) == 1:  # matplotlib cannot scale an axis with a single x
        axes.set_xlim(xs[0] / 2, xs[0] * 2)


def heat(
    panels: Sequence[tuple[str, Float[Array, "_ _"], Sequence[str], Sequence[str]]],
    path: str | pathlib.Path,
    *,
    label: str = "",
    limits: tuple[Number, Number] | None = None,
    columns: int = 3,
    numbers: bool = True,
    grouped: bool = True,
    picture: tuple[Float[Array, "height width 3"], int, int] | None = None,
) -> pathlib.Path:
    """Matrices side by side on one colour scale: (title, values, row names, column names).

    `grouped`: adjacent equal names form a group with one label, and a line separates groups.  NaN is an empty cell.
    `picture`: an image as the first panel, with its numbers of rows and columns of patches; patches are numbered.
    `limits`: default to the range of the values; with both signs, 0 is white and the limits are symmetric.
    `label`: the name of the scale.  `numbers`: writes the values into matrices of up to 16 by 16.

    >>> classes, matrix = similarity(codes, labels)
    >>> names = [class_name(task, "rule", int(label)) for label in classes]
    >>> heat([("HYLA, last layer", matrix, names, names)], "5e.svg", label="cosine similarity", limits=(-1, 1))
    """
    _check_panels(panels)
    low, high = limits or _extent([values for _, values, _, _ in panels])
    named = [(rows, names) for _, _, rows, names in panels]
    tall, wide = (max(len(_groups(names[i], grouped)) for names in named) for i in (0, 1))
    size = 1.8 + 0.27 * min(max(wide, 5), 20), 1.3 + 0.27 * min(max(tall, 2), 20)
    count = len(panels) + (picture is not None)
    figure, grid = grid_of(-(-count // columns), min(columns, count), size)
    if picture is not None:
        _patches(grid.pop(0), *picture)
    colours = "RdBu_r" if low < 0 < high else "cividis"
    for axes, (title, values, rows, names) in zip(grid, panels, strict=False):
        image = axes.imshow(
            np.ma.masked_invalid(values), colours, aspect="auto", interpolation="nearest", vmin=low, vmax=high
        )
        _names(axes.yaxis, axes.axhline, rows, grouped)
        _names(axes.xaxis, axes.axvline, names, grouped)
        axes.spines[:].set_visible(False)
        axes.set_facecolor("#d0d4d9")  # an empty cell; white would mean 0
        axes.set_title(title, fontsize=9, color=INK)
        if numbers and max(values.shape) <= 16:
            _numbers(axes, values, image)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _bar(figure, image, grid, 0.03).set_label(label, fontsize=9)
    return save(figure, path)


def _bar(figure: "Figure", image: Any, axes: "Axes | list[Axes]", fraction: float) -> Any:
    bar = figure.colorbar(image, ax=axes, fraction=fraction, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)
    return bar


def _check_panels(panels: Sequence[tuple[str, Array, Sequence[str], Sequence[str]]]) -> None:
    if not panels:
        raise ValueError("heat: at least one panel was wanted but none came")
    for title, values, rows, names in panels:
        if values.shape != (len(rows), len(names)):
            wanted = (len(rows), len(names))
            raise ValueError(f"heat: {wanted} names but values of shape {values.shape} in panel {title!r}")


def code_maps(
    panels: Sequence[tuple[str, Float[Array, "b 2"], Float[Array, " b"] | Int[Array, " b"]]],
    path: str | pathlib.Path,
    *,
    columns: int = 4,
    names: Mapping[str, Mapping[int, str]] | None = None,
) -> pathlib.Path:
    """Maps of codes side by side: (title, points, values).  Integer values are classes, other values a colour scale.

    `names`: panel title -> names of its classes, for a legend below the panel.

    >>> code_maps([("by target", embed(codes), targets), ("by term 1", embed(codes), terms[:, 0])], "codes.png")
    """
    if not panels:
        raise ValueError("code_maps: at least one panel was wanted but none came")
    rows = -(-len(panels) // columns)
    figure, grid = grid_of(rows, min(columns, len(panels)))
    for axes, (title, points, values) in zip(grid, panels, strict=False):
        if np.issubdtype(values.dtype, np.integer):
            _classes(axes, points, values, (names or {}).get(title, {}))
        else:
            dots = axes.scatter(points[:, 0], points[:, 1], c=values, s=7, cmap="cividis", linewidths=0)
            _bar(figure, dots, axes, 0.05)
        axes.set_title(title, fontsize=9, color=INK)
    for axes in grid:
        axes.set_axis_off()
    return save(figure, path)


def _classes(axes: "Axes", points: Array, values: Array, names: Mapping[int, str]) -> None:
    """Draw classes with six colours times seven markers, so that no class depends on colour alone."""
    colours = (*COLOURS.values(), *SPARE[:3])
    for value in np.unique(values):
        mine = points[values == value]
        marker = MARKERS[int(value) // len(colours) % len(MARKERS)]
        colour, name = colours[int(value) % len(colours)], names.get(int(value), f"class {value}")
        axes.scatter(mine[:, 0], mine[:, 1], s=9, color=colour, marker=marker, linewidths=0, label=name)
    if names:
        legend = partial(axes.legend, columnspacing=0.6, handletextpad=0.2, frameon=False)
        legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, fontsize=6)


def _line(axes: "Axes", points: Mapping[Number, Sequence[Number]], label: str, style: tuple[str, str]) -> None:
    """Draw the mean and standard error at each x; several values at one x also appear as dots."""
    colour, marker = style
    xs = sorted(points)
    values = [np.asarray(points[x], float) for x in xs]
    errors = [each.std(ddof=1) / len(each) ** 0.5 if len(each) > 1 else 0.0 for each in values]
    few, (ls, mfc) = len(xs) <= 12, ("--", "white") if label.endswith(UNTRAINED) else ("-", colour)
    axes.errorbar(
        xs, [each.mean() for each in values], yerr=errors if any(errors) else None, fmt=marker if few else "",
        ls=ls, lw=1.5, ms=5, mfc=mfc, capsize=2, color=colour, label=label, zorder=3,
    )  # fmt: skip
    for x, each in zip(xs, values, strict=True):
        if few and len(each) > 1:
            axes.scatter(np.full(len(each), x), each, s=6, color=colour, alpha=0.5, linewidths=0, zorder=2)


def _level(axes: "Axes", level: Level, xs: Sequence[Number], name: str, names: Sequence[str], log: bool) -> None:
    """Draw a floor or ceiling: a horizontal line, or a step around each x that reaches half-way to the next x."""
    dash = LINES.get(name, DASHES[names.index(name) % len(DASHES)])
    look: dict[str, Any] = {"color": FAINT, "lw": 1.2, "ls": dash, "zorder": 1}
    if not isinstance(level, Mapping) or len(xs) == 1:
        axes.axhline(level[xs[0]] if isinstance(level, Mapping) else level, label=name, **look)
        return
    place = np.log(xs) if log else np.asarray(xs, float)
    middle = (place[1:] + place[:-1]) / 2
    edges = np.concatenate([[2 * place[0] - middle[0]], middle, [2 * place[-1] - middle[-1]]])
    edges = np.exp(edges) if log else edges
    for i, x in enumerate(xs):
        if x in level:
            axes.plot(edges[i : i + 2], [level[x]] * 2, label=name, **look)


def _legend(figure: "Figure", grid: Sequence["Axes"], order: Sequence[str], columns: int) -> None:
    """Draw one legend with all labels below the panels."""
    found = {name: x for axes in reversed(grid) for x, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    draw = partial(figure.legend, list(map(found.get, order)), order, loc="outside lower center", frameon=False)
    for ncols in range(min(2 * columns, len(order)), 0, -1):
        legend = draw(ncols=ncols, fontsize=8)
        if ncols == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()  # wider than the figure, which would cut it off


def _extent(matrices: Sequence[Array]) -> tuple[float, float]:
    """The smallest and largest finite value; symmetric about 0 if both signs occur."""
    every = np.concatenate([values[np.isfinite(values)].ravel() for values in matrices])
    low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)
    return (-max(-low, high), max(-low, high)) if low < 0 < high else (low, high)


def _groups(names: Sequence[str], grouped: bool) -> list[tuple[str, int, int]]:
    """(name, first index, last index) of each run of equal names."""
    found: list[tuple[str, int, int]] = []
    for i, name in enumerate(names):
        if grouped and found and found[-1][0] == name:
            found[-1] = (name, found[-1][1], i)
        else:
            found.append((name, i, i))
    return found


def _names(axis: Any, line: Any, names: Sequence[str], grouped: bool) -> None:
    """One tick per group of equal names, and white lines between groups."""
    groups = _groups(names, grouped)
    places, words = [(first + last) / 2 for _, first, last in groups], [name for name, _, _ in groups]
    axis.set_ticks(places, words, parse_math=False)  # names may be tokens, such as "$$"
    upright = axis.axis_name == "x" and max(len(name) for name, _, _ in groups) > 3
    axis.set_tick_params(length=0, labelsize=7, rotation=90 if upright else 0)
    if len(groups) < len(names):
        for _, first, _ in groups[1:]:
            line(first - 0.5, color="white", lw=1.5)


def _patches(axes: "Axes", pixels: Array, rows: int, columns: int) -> None:
    """Draw an image with its patches numbered from 1, row by row."""
    axes.imshow(pixels, extent=(0, columns, rows, 0), interpolation="nearest")
    axes.set_xticks(range(columns + 1), [""] * (columns + 1))
    axes.set_yticks(range(rows + 1), [""] * (rows + 1))
    axes.grid(color="white", lw=0.5)
    axes.tick_params(length=0)
    box = {"facecolor": "black", "alpha": 0.45, "pad": 0.8, "linewidth": 0}
    for i in range(rows * columns):
        place = i % columns + 0.08, i // columns + 0.12
        axes.text(*place, str(i + 1), ha="left", va="top", fontsize=6, color="white", bbox=box)


def _numbers(axes: "Axes", values: Array, image: Any) -> None:
    """Write the values into their cells, dark on light cells and light on dark cells."""
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
            text = f"{round(value, 2) + 0.0:.2f}".removeprefix("0").replace("-0.", "−.").replace("-", "−")  # no −.00
            written = axes.text(column, row, text, ha="center", va="center", fontsize=6, color=ink)
            written.set_in_layout(False)  # the text is inside the axes; measuring it would be slow


def _name_floors(axes: "Axes", floors: Mapping[str, float]) -> None:
    """Write the names above their lines, each as low as possible without overlap."""
    left, right = axes.get_xlim()
    wide = (right - left) / 50  # of a letter where long names of rows leave the axes half of the figure
    levels: list[float] = []  # where the last name of each level ends
    for name, value in sorted(floors.items(), key=lambda pair: pair[1]):
        start = value - wide * len(name) / 2
        level = next((i for i, end in enumerate(levels) if end < start), len(levels))
        levels[level : level + 1] = [start + wide * (len(name) + 1)]
        place, above, units = (value, 1.0), (0, 4 + 10 * level), ("data", "axes fraction")
        axes.annotate(name, place, above, units, "offset points", ha="center", fontsize=8, color=FAINT)


def _style(label: str, labels: Sequence[str]) -> tuple[str, str]:
    """The style of a label: a mechanism's own colour and marker go to its unmodified variant, or to its first."""
    label, *labels = (each.removesuffix(UNTRAINED) for each in (label, *labels))
    place, name = labels.index(label), label.partition(" ")[0]
    kin = [other for other in labels if other.partition(" ")[0] == name]
    if name in COLOURS and label == (name if name in kin else kin[0]):
        return COLOURS[name], MARKS[name]
    return SPARE[place % len(SPARE)], MARKERS[place % len(MARKERS)]
