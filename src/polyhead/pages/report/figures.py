"""The interactive plotly figures of results and curves, and the style that all figures share.

Figures use the colours of the light theme; the page's script maps them to the dark theme.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from polyhead.analysis import figures as stills
from polyhead.analysis.canvas import FAINT, INK
from polyhead.config import Task
from polyhead.pages.report.headline import floor, iid_words, metric_name, ranked, split_name, where, with_error
from polyhead.pages.report.runs import SeedGroup, Summary, Table, headline

GRID = "#e4e7eb"
COLOURS = {label.lower(): colour for label, colour in stills.COLOURS.items()}  # one colour in pages and still figures
COLOURS |= {"mixture": "#cc5f9f", "relational": "#d55e00"}
EXTRA = ("#d55e00", "#56a5d9", "#8a6fc4", "#8c8c1f", "#7a4a2b", "#4d4d4d")
GLYPHS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "cross": "✚", "triangle-down": "▼"}
GLYPHS |= {"star": "★", "hexagon": "⬢", "x": "✖"}
MARKERS = tuple(GLYPHS)
LOWEST = -0.5  # least score shown in curves
DASHES = ("dash", "dashdot", "longdash", "longdashdot")  # of floors; a ceiling is dotted
CLASSES = ("#0072b2", "#d98c00", "#009e73", "#cc5f9f", "#d55e00", "#56a5d9")
SHAPES = ("circle", "diamond", "square", "triangle-up", "cross", "star", "x", "triangle-down")
Style = tuple[str, str]

DARK = {
    INK: "#e6e9ed",
    FAINT: "#98a2ad",
    GRID: "#333b44",
    "#0072b2": "#4fa8e0",
    "#d98c00": "#f0b030",
    "#009e73": "#2bc79b",
    "#cc5f9f": "#e58fc0",
    "#d55e00": "#f58040",
    "#56a5d9": "#8cc8f0",
    "#8a6fc4": "#b39ddb",
    "#8c8c1f": "#c5c552",
    "#7a4a2b": "#c08a66",
    "#4d4d4d": "#b0b0b0",
    "#f4f6f8": "#232a32",
}
"""Maps each colour of the light theme to the dark theme."""

SCALES = {
    "plain": [[0.0, "#f4f6f8"], [1.0, "#0072b2"]],
    "signed": [[0.0, "#0072b2"], [0.5, "#f4f6f8"], [1.0, "#d55e00"]],
}
"""Colour scales of matrices: in both themes zero is close to the background."""


def dashes(task: Task, table: Iterable[str]) -> dict[str, str]:
    """The floors and the ceiling drawn as lines, with their dash styles: those that the task draws, else chance."""
    drawn = [name for name, one in task.words.floors.items() if one.drawn and name != "ceiling"]
    style = dict(zip(drawn, itertools.cycle(DASHES), strict=False)) | {"ceiling": "dot"}
    return {name: style[name] for name in table if name in style} or {n: "dash" for n in table if n == "chance"}


def styles(found: Sequence[SeedGroup]) -> dict[str, Style]:
    """Colour and marker by label: a mechanism has the same colour in every report, its variants get spare colours."""
    chosen: dict[str, Style] = {}
    used: set[str] = set()
    for i, group in enumerate(found):
        colour = COLOURS.get(group.kind, FAINT)
        if colour in used:
            colour = next((spare for spare in EXTRA if spare not in used), EXTRA[i % len(EXTRA)])
        used.add(colour)
        chosen[group.label] = (colour, MARKERS[i % len(MARKERS)])
    return chosen


def category(index: int) -> tuple[str, str, str]:
    """Colour, marker and glyph of class `index`: 48 classes, distinguishable not only by colour."""
    shape = SHAPES[index // len(CLASSES) % len(SHAPES)]
    return CLASSES[index % len(CLASSES)], shape, GLYPHS[shape]


def blank(height: int, *, x: str = "", y: str = "", legend: bool = True) -> go.Figure:
    axis: dict[str, object] = {"title": {"standoff": 8}, "automargin": True, "ticks": "outside"}
    axis |= {"gridcolor": GRID, "linecolor": FAINT, "zerolinecolor": GRID, "tickcolor": GRID}
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 12, "t": 12, "b": 8},
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        xaxis={**axis, "title": {"text": x, "standoff": 8}},
        yaxis={**axis, "title": {"text": y, "standoff": 8}},
    )
    return figure


# ------------------------------------------------------------------------------------------------------------- results
def results(found: Sequence[SeedGroup], table: Table) -> go.Figure:
    """One row per mechanism, best first, then the floors.

    Filled: the score on the headline's split; hollow: on iid; dots: single seeds.
    """
    style, split, task, unseen = styles(found), headline(found), found[0].task, where(found)
    scored = ranked(found)[::-1]
    floors = sorted((n for n in table if split in table[n]), key=lambda n: task.gain(table[n][split].mean))
    fresh = f"{iid_words(found)} (iid)"
    figure = blank(90 + 34 * (len(scored) + len(floors)), x=metric_name(task.metric))
    figure.update_yaxes(title=None, showgrid=False, type="category", ticks="")
    order = [floor(task, n).label for n in floors if n != "ceiling"] + [group.label for group, _ in scored]
    order += [floor(task, "ceiling").label] if "ceiling" in floors else []
    figure.update_yaxes(categoryorder="array", categoryarray=order)
    lines = dashes(task, floors)
    for name in floors:
        row = table[name][split]
        _point(figure, floor(task, name).label, row, (FAINT, "line-ns-open"), "floors and ceiling")
        if name in lines:
            figure.add_vline(row.mean, line={"color": FAINT, "width": 1.5, "dash": lines[name]})
    for group, score in scored:
        iid = group.score("iid")
        colour, marker = style[group.label]
        if iid is not None and split != "iid":
            _point(figure, group.label, iid, (colour, f"{marker}-open"), fresh)
        _point(figure, group.label, score, (colour, marker), unseen)
        if score.n > 1:
            _seeds(figure, group.label, score, colour)
    for name, marker in [(unseen, "circle"), (fresh, "circle-open")][: 1 if split == "iid" else 2]:
        look = {"color": INK, "symbol": marker, "size": 10, "line": {"width": 2, "color": INK}}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=look)
    return figure


def _point(figure: go.Figure, row: str, score: Summary, style: Style, name: str) -> None:
    spread = {"type": "data", "array": [score.error or 0.0], "thickness": 1.5, "width": 5, "color": style[0]}
    figure.add_scatter(
        x=[score.mean],
        y=[row],
        error_x=spread,
        mode="markers",
        showlegend=False,
        marker={"color": style[0], "symbol": style[1], "size": 12, "line": {"width": 2, "color": style[0]}},
        hovertemplate=f"{row}<br>{name}: {with_error(score)}<extra></extra>",
    )


def _seeds(figure: go.Figure, row: str, score: Summary, colour: str) -> None:
    figure.add_scatter(
        x=list(score.values),
        y=[row] * score.n,
        mode="markers",
        showlegend=False,
        marker={"color": colour, "size": 5, "opacity": 0.6},
        hovertemplate=f"{row}, one seed: %{{x:.3f}}<extra></extra>",
    )


# -------------------------------------------------------------------------------------------------------------- curves
def losses(found: Sequence[SeedGroup]) -> go.Figure:
    """Training loss over steps, one line per seed."""
    figure = blank(320, x="optimiser step", y="training loss (log scale)")
    figure.update_yaxes(type="log", dtick="D2")
    _lines(figure, found, "train", "loss", None)
    return figure


def scores(found: Sequence[SeedGroup], split: str, table: Table) -> go.Figure:
    """The metric on one split over steps, one line per seed, with the floors and the ceiling."""
    task, metric = found[0].task, found[0].task.metric
    figure = blank(320, x="optimiser step", y=f"{split_name(split)} {metric_name(metric)}")
    _lines(figure, found, "eval", metric, split)
    rows = {name: row[split].mean for name, row in table.items() if split in row and row[split].mean > LOWEST}
    lines = dashes(task, rows)
    for name, value in rows.items():
        width, opacity = (1.5, 1.0) if name in lines else (1.0, 0.6)
        figure.add_hline(value, line={"color": FAINT, "width": width, "dash": lines.get(name, "dot")}, opacity=opacity)
    seen = [y for g in found for e in g.entries for y in e.curve("eval", metric, split)[1] if math.isfinite(y)]
    # A run or floor far below would compress the rest of the plot.
    low = min([*rows.values(), max(min(seen, default=0.0), LOWEST)]) - 0.08
    low = max(low, -0.03) if min([*rows.values(), *seen], default=-1.0) >= 0 else low
    top = max([*rows.values(), 1.0 if metric == "r2" else max(seen, default=1.0)]) + 0.06
    figure.update_yaxes(range=[low, top])
    for name, height in spread(rows, 0.075 * (top - low), low).items():
        text = floor(task, name).short or name
        font = {"size": 11, "color": FAINT}
        figure.add_annotation(xref="paper", x=1.01, y=height, text=text, font=font, showarrow=False, xanchor="left")
    figure.update_layout(margin={"l": 8, "r": 58, "t": 12, "b": 8})
    return figure


def together(found: Sequence[SeedGroup], table: Table) -> go.Figure:
    """The metric over steps on fresh data (dotted) and on the headline's split (solid), with its floors and ceiling."""
    figure, style, metric = scores(found, headline(found), table), styles(found), found[0].task.metric
    for group in found:
        for entry in group.entries:
            steps, ys = entry.curve("eval", metric, "iid")
            name = f"{group.label}, known, seed {entry.run.seed}"
            figure.add_scatter(
                x=steps,
                y=ys,
                mode="lines",
                showlegend=False,
                line={"color": style[group.label][0], "width": 1.6, "dash": "dot"},
                hovertemplate=f"{name}<br>step %{{x:,}}: %{{y:.4f}}<extra></extra>",
            )
    figure.update_layout(height=380)
    figure.update_yaxes(title={"text": metric_name(metric), "standoff": 8})
    for name, dash in (("unseen", "solid"), ("known", "dot")):
        figure.add_scatter(x=[None], y=[None], mode="lines", name=name, line={"color": INK, "width": 2, "dash": dash})
    return figure


def spread(heights: dict[str, float], least: float, low: float) -> dict[str, float]:
    """The heights, moved apart as little as possible to distances of at least `least`; none is below `low`."""
    names = sorted(heights, key=lambda name: heights[name])
    moved = [heights[name] for name in names]
    for _ in range(20):
        for i in range(len(moved) - 1):
            if (lack := least - (moved[i + 1] - moved[i])) > 1e-9:
                moved[i], moved[i + 1] = moved[i] - lack / 2, moved[i + 1] + lack / 2
    for i, height in enumerate(moved):
        moved[i] = max(height, moved[i - 1] + least if i else low)
    return dict(zip(names, moved, strict=True))


def _lines(figure: go.Figure, found: Sequence[SeedGroup], kind: str, value: str, split: str | None) -> None:
    style = styles(found)
    for group in found:
        shown = False
        for entry in group.entries:
            steps, ys = entry.curve(kind, value, split)
            if not steps:
                continue
            colour, marker = style[group.label]
            figure.add_scatter(
                x=steps,
                y=ys,
                mode="lines" if kind == "train" else "lines+markers",
                name=group.label,
                legendgroup=group.label,
                showlegend=not shown,
                line={"color": colour, "width": 2 if len(group.entries) == 1 else 1.4},
                marker={"symbol": marker, "size": 6},
                opacity=1.0 if entry.result else 0.5,
                hovertemplate=f"{group.label}, seed {entry.run.seed}<br>step %{{x:,}}: %{{y:.4f}}<extra></extra>",
            )
            shown = True
