"""Figures of measured values, for papers, pages and notebooks, with matplotlib.

results(measured)      one row per mechanism, with baselines and ceiling
lines(panels)          scores along an axis (examples, heads, steps, ...), with standard errors over seeds
heat(panels)           matrices with named rows and columns: similarities, codes, drops of zeroed heads
code_maps(panels)      two-dimensional maps of codes

Each returns a matplotlib figure, which a notebook shows by itself.  `save(figure, "a.svg", "a.png")` writes files.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float, Int

from polyhead.analysis.canvas import FAINT, INK, one_panel, panel_grid, plain, save
from polyhead.analysis.labels import mechanism_label
from polyhead.spec.shapes import check_number
from polyhead.tasks.base import SPLIT_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "UNTRAINED", "code_maps", "heat", "lines", "results", "save", "style_by_label"]

Array = np.ndarray
Number = int | float
# Label -> x -> the scores of the seeds.
Series = Mapping[str, Mapping[Number, Sequence[Number]]]
Level = Number | Mapping[Number, Number]
# Baselines and ceiling by name: a number, or a number for each x.
Levels = Mapping[str, Level]
# Colour and marker.
Style = tuple[str, str]

# Colour and marker of the compared mechanisms, the same in every figure, by label.
STYLES: dict[str, Style] = {
    mechanism_label("hyla"): ("#009e73", "o"),
    mechanism_label("softmax"): ("#0072b2", "s"),
    mechanism_label("linear"): ("#d98c00", "D"),
}
COLOURS = {label: colour for label, (colour, _) in STYLES.items()}
SPARE_COLOURS = (
    "#cc5f9f", "#d55e00", "#56a5d9", "#8a6fc4", "#7a4b2a", "#24292f", "#8f9a00", "#a8123e", "#12d6c5", "#5b3a8c",
    "#2e5e3e", "#f4978e",
)  # fmt: skip
SPARE_MARKERS = ("o", "s", "D", "^", "P", "v", "*")
BASELINE_DASHES: dict[str, Any] = {"Gaussian process": "--", "Exact ceiling": ":", "Mixture": "-"}
SPARE_DASHES: tuple[Any, ...] = ("-.", (0, (3, 5)), (0, (6, 2, 1, 2, 1, 2)), (0, (8, 3)))
# A label that ends so has the style of the label without it, but dashed, with hollow marks.
UNTRAINED = ", untrained"
EMPTY_CELL = "#d0d4d9"
# Inches of matrices side by side: in a wider figure a page would shrink the names until nobody can read them.
MAX_WIDTH = 12.0
# Curves with more points than that are lines without marks.
MAX_POINTS_AS_MARKS = 12


# -------------------------------------------------------------------------------------------------------------- styles
def style_by_label(labels: Collection[str]) -> dict[str, Style]:
    """The colour and marker of each label of a figure.

    A mechanism's own style goes to the shortest label that begins with its name.  All others get spare styles, by
    their place.
    """
    names = list(dict.fromkeys(label.removesuffix(UNTRAINED) for label in labels))
    styles: dict[str, Style] = {}
    for i, name in enumerate(names):
        styles[name] = SPARE_COLOURS[i % len(SPARE_COLOURS)], SPARE_MARKERS[i % len(SPARE_MARKERS)]
    unused = dict(STYLES)
    # `pop` gives a style once: a longer label of the same mechanism keeps its spare style.
    for name in sorted(names, key=len):
        styles[name] = unused.pop(name.partition(" ")[0], styles[name])
    return {label: styles[label.removesuffix(UNTRAINED)] for label in labels}


def _dash(name: str, names: Sequence[str]) -> Any:
    return BASELINE_DASHES.get(name, SPARE_DASHES[list(names).index(name) % len(SPARE_DASHES)])


def _standard_error(values: Array) -> float:
    """Over seeds; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    return float(values.std(ddof=1)) / math.sqrt(len(values))


# ------------------------------------------------------------------------------------------------------------- results
def results(
    measured: Mapping[str, Sequence[float]],
    *,
    errors: Mapping[str, float] | None = None,
    baselines: Mapping[str, float] | None = None,
    printed: Mapping[str, tuple[float, float, int]] | None = None,
    score: str = f"R² on {SPLIT_NAMES['compositional']}",
    lower_is_better: bool = False,
) -> "Figure":
    """One row per mechanism, best first: a dot per seed, and the mean.  Baselines and ceiling are vertical lines.

    >>> results({"HYLA": [0.76, 0.78], "Softmax": [0.71, 0.69]}, baselines={"Gaussian process": 0.78})

    Args:
        measured: Label -> the scores of its seeds.
        errors: Label -> standard error; by default the standard error over seeds.
        printed: Label -> mean, standard error and number of seeds in a paper: a hollow mark in a row below.
        score: The label of the axis.
    """
    if not measured or not all(map(len, measured.values())):
        raise ValueError("results: every mechanism needs at least one measured score")
    errors, baselines, printed = errors or {}, baselines or {}, printed or {}
    # Rows are drawn from below, so the best comes last.  A diverged run has no finite score.
    means = {}
    for label, scores in measured.items():
        finite_scores = [score for score in scores if math.isfinite(score)]
        worst = math.inf if lower_is_better else -math.inf
        means[label] = float(np.mean(finite_scores)) if finite_scores else worst
    order = sorted(measured, key=means.__getitem__, reverse=lower_is_better)
    figure, axes = one_panel(6.4, 1.1 + 0.42 * (len(order) + len(printed)))
    for name, value in baselines.items():
        axes.axvline(value, color=FAINT, lw=1.2, ls=_dash(name, list(baselines)), zorder=1, label=name)

    # Rows from below: for each mechanism the paper's score, if there is one, and above it the measured one.
    styles = style_by_label(measured)
    row_names: list[str] = []
    for label in order:
        colour, marker = styles[label]
        if label in printed:
            mean, error, count = printed[label]
            row = len(row_names)
            axes.errorbar(mean, row, xerr=error, fmt=marker, color=colour, mfc="white", ms=8, capsize=3, zorder=3)
            row_names.append(f"{label}, the paper (n = {count})")
        all_values = np.asarray(measured[label], float)
        values = all_values[np.isfinite(all_values)]
        count_text = f"n = {len(values)}"
        if len(values) < len(all_values):
            count_text += f", {len(all_values) - len(values)} not finite"
        if not len(values):
            row_names.append(f"{label} ({count_text})")
            continue
        error = errors.get(label, _standard_error(values))
        row = len(row_names)
        axes.errorbar(values.mean(), row, xerr=error, fmt=marker, color=colour, mfc=colour, ms=8, capsize=3, zorder=3)
        if len(values) > 1:
            axes.scatter(values, np.full(len(values), row), s=12, color=colour, alpha=0.6, zorder=2, linewidths=0)
        row_names.append(f"{label} ({count_text})")

    axes.set_yticks(range(len(row_names)), row_names)
    axes.set_ylim(-0.6, len(row_names) - 0.4)
    axes.set_xlabel(score)
    _shared_legend(figure, [axes], list(baselines), 1)
    return figure


# --------------------------------------------------------------------------------------------------------------- lines
def lines(
    panels: Sequence[tuple[str, Series, Levels]],
    *,
    x_label: str | Sequence[str],
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
    limits: tuple[Number | None, Number | None] = (None, None),
    columns: int = 3,
) -> "Figure":
    """Panels side by side: (title, series, baselines).  They share the y axis and the legend.

    A series is {x: scores of the seeds}: a line through the means, and for several seeds the standard error and a dot
    per seed.  A baseline (or ceiling) is a number, a horizontal line, or {x: number}, a bar at each x.

    >>> held_out = {"HYLA": {16: [0.61, 0.66], 32: [0.79, 0.76]}, "Softmax": {16: [0.5, 0.4], 32: [0.6, 0.7]}}
    >>> baselines = {"Gaussian process": {16: 0.50, 32: 0.79}, "Exact ceiling": 1.0}
    >>> lines([("70 % held out", held_out, baselines)], x_label="examples", y_label="R²", log_x=True)

    Args:
        x_label: One for all panels, or one for each.
        limits: Those of the y axis; a limit that is None, or that would hide a score, is chosen from the values.
    """
    _check_series(panels)
    # Each label once, in the order of the panels.
    ordered_labels: dict[str, None] = {}
    ordered_baselines: dict[str, None] = {}
    for _, series, baselines in panels:
        ordered_labels |= dict.fromkeys(series)
        ordered_baselines |= dict.fromkeys(baselines)
    labels, baseline_names = list(ordered_labels), list(ordered_baselines)
    styles = style_by_label(labels)
    rows = math.ceil(len(panels) / columns)
    columns = min(columns, len(panels))
    width = 3.0 if columns > 1 else 4.4
    figure, grid = panel_grid(rows, columns, (width, 2.9), sharey=True)
    x_labels = [x_label] * len(panels) if isinstance(x_label, str) else x_label
    for i, (axes, (title, series, baselines)) in enumerate(zip(grid, panels, strict=False)):
        plain(axes, "both")
        xs = sorted(set().union(*series.values()))
        if log_x:
            _logarithmic(axes, "x", xs)
        for label, points in series.items():
            _draw_series(axes, points, label, styles[label])
        for name, level in baselines.items():
            _draw_level(axes, level, name, _dash(name, baseline_names))
        _ticks(axes, xs, log_x)
        axes.set_title(title, fontsize=9, color=INK)
        axes.set_xlabel(x_labels[i], fontsize=9)
    scores = _all_scores(panels)
    if log_y:
        _logarithmic(grid[0], "y", scores)
    low, high = limits
    finite_scores = [score for score in scores if math.isfinite(score)]
    if low is not None and min(finite_scores, default=low) < low:
        low = None
    if high is not None and max(finite_scores, default=high) > high:
        high = None
    grid[0].set_ylim(low, high)
    for axes in grid[::columns]:
        axes.set_ylabel(y_label, fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _shared_legend(figure, grid[: len(panels)], [*labels, *baseline_names], columns)
    return figure


def _check_series(panels: Sequence[tuple[str, Series, Levels]]) -> None:
    """Raise ValueError for a panel without series, a series without points, and a point without scores."""
    if not panels:
        raise ValueError("lines: the list of panels is empty")
    for _, series, _ in panels:
        if not series or not all(series.values()):
            raise ValueError("lines: every panel needs at least one series with at least one measured point")
        for points in series.values():
            if not all(map(len, points.values())):
                raise ValueError("lines: every point needs at least one measured score")


def _draw_series(axes: "Axes", points: Mapping[Number, Sequence[Number]], label: str, style: Style) -> None:
    """Draw the mean and standard error at each x; several values at one x also appear as dots."""
    colour, marker = style
    xs = sorted(points)
    scores = [np.asarray(points[x], float) for x in xs]
    errors = list(map(_standard_error, scores))
    dash, fill = "-", colour
    if label.endswith(UNTRAINED):
        dash, fill = "--", "white"
    has_marks = len(xs) <= MAX_POINTS_AS_MARKS
    means = list(map(np.mean, scores))
    axes.errorbar(
        xs, means, yerr=errors if any(errors) else None, fmt=marker if has_marks else "", ls=dash, mfc=fill, lw=1.5,
        ms=5, capsize=2, color=colour, label=label, zorder=3,
    )  # fmt: skip
    for x, values in zip(xs, scores, strict=True):
        if has_marks and len(values) > 1:
            axes.scatter(np.full(len(values), x), values, s=6, color=colour, alpha=0.5, linewidths=0, zorder=2)


def _draw_level(axes: "Axes", level: Level, name: str, dash: Any) -> None:
    """Draw a baseline or ceiling: a horizontal line, or a bar at each x and a line through them."""
    style: dict[str, Any] = {"color": FAINT, "lw": 1.2, "ls": dash, "zorder": 1, "label": name}
    if isinstance(level, Mapping):
        xs = sorted(level)
        axes.plot(xs, [level[x] for x in xs], marker="_", ms=8, **style)
    else:
        axes.axhline(level, **style)


def _logarithmic(axes: "Axes", name: Literal["x", "y"], values: Sequence[Number]) -> None:
    """Make an axis logarithmic, with numbers between the powers of ten where there is room."""
    if min(values) <= 0:
        raise ValueError(f"lines: numbers on a logarithmic axis must be above 0 but one is {min(values):g}")
    low, high = min(values), max(values)
    between: Sequence[int] = ()
    if high < 4 * low:
        between = range(2, 10)
    elif high < 10 * low:
        between = (2, 3, 5)
    elif high < 100 * low:
        between = (2, 5)
    getattr(axes, f"set_{name}scale")("log", subs=between)
    axis = getattr(axes, f"{name}axis")
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}")
    if low == high:  # matplotlib cannot scale an axis with a single number
        getattr(axes, f"set_{name}lim")(low / 2, high * 2)


def _ticks(axes: "Axes", xs: Sequence[Number], log_x: bool) -> None:
    """A number at each x where there are few, otherwise few enough numbers not to overlap."""
    if len(xs) <= 8:
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.minorticks_off()
    elif not log_x:
        axes.locator_params(axis="x", nbins=5)


def _all_scores(panels: Sequence[tuple[str, Series, Levels]]) -> list[Number]:
    scores: list[Number] = []
    for _, series, _ in panels:
        for points in series.values():
            for values in points.values():
                scores.extend(values)
    return scores


def _shared_legend(figure: "Figure", grid: Sequence["Axes"], order: Sequence[str], columns: int) -> None:
    """Draw one legend with all labels below the panels, as wide as fits."""
    handles: dict[str, Any] = {}
    for axes in reversed(grid):
        panel_handles, panel_labels = axes.get_legend_handles_labels()
        handles.update(zip(panel_labels, panel_handles, strict=True))
    ordered = list(map(handles.__getitem__, order))
    for legend_columns in range(min(2 * columns, len(order)), 0, -1):
        legend = figure.legend(
            ordered, order, loc="outside lower center", frameon=False, fontsize=8, labelcolor=INK, ncols=legend_columns
        )
        if legend_columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()  # wider than the figure, which would cut it off


# ---------------------------------------------------------------------------------------------------------------- heat
def heat(
    panels: Sequence[tuple[str, Float[Array, "_ _"], Sequence[str], Sequence[str]]],
    *,
    label: str = "",
    limits: tuple[Number, Number] | None = None,
    columns: int = 3,
    numbers: bool = True,
) -> "Figure":
    """Matrices side by side on one colour scale: (title, values, row names, column names).  NaN is an empty cell.

    If all matrices have the same names, only the outer matrices show the names.

    >>> classes, matrix = similarity(codes, labels)
    >>> names = [task.class_name("rule", int(label)) for label in classes]
    >>> heat([("HYLA, last layer", matrix, names, names)], label="cosine similarity", limits=(-1, 1))

    Args:
        label: The name of the scale.
        limits: By default the range of the values; with both signs, 0 is white and the limits are symmetric.
        numbers: Whether to write the values into matrices of up to 16 by 16.
    """
    if not panels:
        raise ValueError("heat: the list of panels is empty; give at least one")
    matrices = []
    for title, values, rows, names in panels:
        matrices.append(values)
        if values.shape != (len(rows), len(names)):
            shape = (len(rows), len(names))
            raise ValueError(f"heat: {shape} names but values of shape {values.shape} in panel {title!r}")
    low, high = limits or _extent(matrices)

    # A panel is as large as its names need, within bounds: 0.27 inches for a row or column.
    tall, wide = np.max(list(map(np.shape, matrices)), axis=0)  # over the panels
    width, height = 1.8 + 0.27 * min(max(wide, 5), 20), 1.3 + 0.27 * min(max(tall, 2), 20)
    count = len(panels)
    scale = min(1.0, MAX_WIDTH / (width * min(columns, count)))
    size = width * scale, height * scale
    shared = len({(tuple(rows), tuple(names)) for _, _, rows, names in panels}) == 1
    figure, grid = panel_grid(math.ceil(count / columns), min(columns, count), size, sharex=shared, sharey=shared)

    colour_map = "RdBu_r" if low < 0 < high else "cividis"
    for axes, (title, values, rows, names) in zip(grid, panels, strict=False):
        cells = np.ma.masked_invalid(values)
        # Without interpolation an SVG has one pixel a cell.
        image = axes.imshow(cells, colour_map, aspect="auto", interpolation="none", vmin=low, vmax=high)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.tick_params(length=0, labelsize=7, labelcolor=INK)
        axes.spines[:].set_visible(False)
        axes.set_facecolor(EMPTY_CELL)  # white would mean 0
        axes.set_title(title, fontsize=9, color=INK)
        if numbers and max(values.shape) <= 16:
            _write_numbers(axes, values, image)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _colour_bar(figure, image, grid, 0.03).set_label(label, fontsize=9, color=INK)
    return figure


def _colour_bar(figure: "Figure", image: Any, axes: "Axes | list[Axes]", fraction: float) -> Any:
    bar = figure.colorbar(image, ax=axes, fraction=fraction, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, colors=INK)
    return bar


def _extent(matrices: Sequence[Array]) -> tuple[float, float]:
    """The smallest and largest finite value; symmetric about 0 if both signs occur."""
    finite = np.concatenate([values[np.isfinite(values)] for values in matrices])
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if low < 0 < high:
        largest = max(-low, high)
        return -largest, largest
    return low, high


def _write_numbers(axes: "Axes", values: Array, image: Any) -> None:
    """Write the values into their cells, dark on light cells and light on dark cells."""
    for (row, column), value in np.ndenumerate(values):
        if not np.isfinite(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        is_light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
        # ".25" and "−.25", without a zero before the point; + 0.0 turns -0.0 into 0.0.
        digits = f"{round(value, 2) + 0.0:.2f}".removeprefix("0").replace("-0.", "−.").replace("-", "−")
        colour = "black" if is_light else "white"  # fixed, as the colours of cells are: they follow no theme
        text = axes.text(column, row, digits, ha="center", va="center", fontsize=6, color=colour)
        text.set_in_layout(False)  # the text is inside the axes; measuring it would be slow


# ---------------------------------------------------------------------------------------------------------------- maps
def code_maps(
    panels: Sequence[tuple[str, Float[Array, "b 2"], Float[Array, " b"] | Int[Array, " b"]]],
    *,
    columns: int = 4,
    names: Mapping[str, Mapping[int, str]] | None = None,
) -> "Figure":
    """Maps of codes side by side: (title, points, values).  Integer values are classes, other values a colour scale.

    Points are pixels in SVG files, too: thousands of shapes would make a file large.

    >>> code_maps([("by target", embed(codes), targets), ("by term 1", embed(codes), terms[:, 0])])

    Args:
        names: The title of a panel -> names of its classes, for a legend below the panel.
    """
    if not panels:
        raise ValueError("code_maps: the list of panels is empty; give at least one")
    check_number("code_maps", "columns", columns, 1)
    figure, grid = panel_grid(math.ceil(len(panels) / columns), min(columns, len(panels)))
    for axes, (title, points, values) in zip(grid, panels, strict=False):
        values = np.asarray(values)
        if np.issubdtype(values.dtype, np.integer):
            _draw_classes(axes, points, values, (names or {}).get(title, {}))
        else:
            x, y = points.T
            dots = axes.scatter(x, y, c=values, s=7, cmap="cividis", linewidths=0, rasterized=True)
            _colour_bar(figure, dots, axes, 0.05)
        axes.set_title(title, fontsize=9, color=INK)
    for axes in grid:
        axes.set_axis_off()
    return figure


def _draw_classes(axes: "Axes", points: Array, values: Array, names: Mapping[int, str]) -> None:
    """Draw classes with six colours times seven markers, each group of six classes has a marker of its own."""
    colours = (*COLOURS.values(), *SPARE_COLOURS[:3])
    classes = np.unique(values).tolist()
    # A class has the same style in every panel, unless two classes of this panel would then look alike.
    num_styles = len(colours) * len(SPARE_MARKERS)
    are_distinct = len({value % num_styles for value in classes}) == len(classes)
    for place, value in enumerate(classes):
        x, y = points[values == value].T
        style = value if are_distinct else place
        colour = colours[style % len(colours)]
        marker = SPARE_MARKERS[style // len(colours) % len(SPARE_MARKERS)]
        name = names.get(value, f"class {value}")
        axes.scatter(x, y, s=9, color=colour, marker=marker, linewidths=0, label=name, rasterized=True)
    if names:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            ncols=2,
            fontsize=6,
            labelcolor=INK,
            columnspacing=0.6,
            handletextpad=0.2,
            frameon=False,
        )
