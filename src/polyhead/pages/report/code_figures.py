"""The interactive figures of latent codes: probes, maps, matrices."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from polyhead.pages.report.codes import CheckpointAnalysis, CodeMap
from polyhead.pages.report.figures import FAINT, SCALES, blank, category, styles
from polyhead.pages.report.headline import number, with_error
from polyhead.pages.report.runs import SeedGroup, Summary, summary

Place = tuple[int, str]
"""Layer and target."""
Cells = dict[tuple[str, Place], tuple[Summary, float]]
"""(mechanism, place) -> the value over seeds, and its chance level."""


# -------------------------------------------------------------------------------------------------------------- probes
def probe_cells(analysed: Sequence[CheckpointAnalysis], view: str, query: str) -> Cells:
    """Cells of the macro F1 of one view's probes; `query`: "fixed" or "varies"."""
    return _cells(
        (one.group.label, (row["layer"], row["target"]), row["f1"], row["chance"])
        for one in analysed
        for row in one.rows
        if (row["pairs"], row["query"]) == (view, query)
    )


def purity_cells(analysed: Sequence[CheckpointAnalysis], view: str) -> Cells:
    """Cells of the share of a code's nearest neighbours with the same label."""
    return _cells(
        (one.group.label, (layer.layer, name), share, chance)
        for one in analysed
        for layer in one.layers(view)
        for name, (share, chance) in layer.purity.items()
    )


def _cells(rows: Iterable[tuple[str, Place, float, float]]) -> Cells:
    found: dict[tuple[str, Place], list[tuple[float, float]]] = {}
    for label, place, value, chance in rows:
        found.setdefault((label, place), []).append((value, chance))
    return {
        key: (summary([value for value, _ in each], None), float(np.mean([chance for _, chance in each])))
        for key, each in found.items()
    }


def over_layers(cells: Cells, found: Sequence[SeedGroup], what: str, top: float) -> go.Figure:
    """Draw `what` ("macro F1") by layer and target: mean and standard error over seeds, with chance; up to `top`."""
    figure = blank(340, y=what)
    figure.update_yaxes(range=[0, top])
    targets = list(dict.fromkeys(target for _, (_, target) in cells))
    places = sorted({place for _, place in cells}, key=lambda place: (targets.index(place[1]), place[0]))
    ticks = [f"layer {layer + 1}<br>{target}" for layer, target in places]
    for i, (label, (colour, marker)) in enumerate(styles(found).items()):
        mine = [(k, cells[label, place]) for k, place in enumerate(places) if (label, place) in cells]
        shift = (i - (len(found) - 1) / 2) * min(0.16, 0.6 / max(len(found), 1))
        figure.add_scatter(
            x=[k + shift for k, _ in mine],
            y=[cell[0].mean for _, cell in mine],
            error_y={"type": "data", "array": [c[0].error or 0.0 for _, c in mine], "thickness": 1.5, "width": 4},
            mode="markers",
            name=label,
            marker={"color": colour, "symbol": marker, "size": 11},
            text=[f"{what} {with_error(cell[0])}, chance {cell[1]:.3f}" for _, cell in mine],
            hovertemplate=f"{label}<br>%{{text}}<extra></extra>",
        )
    for k, place in enumerate(places):
        chance = float(np.mean([cell[1] for (_, where), cell in cells.items() if where == place]))
        line = {"color": FAINT, "dash": "dash"}
        figure.add_shape(type="line", x0=k - 0.4, x1=k + 0.4, y0=chance, y1=chance, line=line)
        if k == 0:
            figure.add_annotation(x=k - 0.4, y=chance, text="chance", showarrow=False, yshift=9, xanchor="left")
            figure.update_annotations(font={"size": 11, "color": FAINT})
    figure.update_xaxes(tickmode="array", tickvals=list(range(len(places))), ticktext=ticks, showgrid=False)
    figure.update_xaxes(range=[-0.6, len(places) - 0.4], zeroline=False)
    return figure


def ceiling_of(several: Sequence[Cells]) -> float:
    """The upper limit of the y axis that compared figures share."""
    every = [cell for cells in several for cell in cells.values()]
    return 1.12 * max(max(cell[0].mean + (cell[0].error or 0.0), cell[1]) for cell in every)


# ------------------------------------------------------------------------------------------------------------ matrices
def matrix(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    limit: float,
    height: int = 0,
    text: Sequence[Sequence[str]] | None = None,
) -> go.Figure:
    """A heat map with named rows and columns, from -`limit` (blue) over 0 (pale) to `limit` (vermilion).

    `text` (row column): the hover label of each cell, by default both names and the value.  Adjacent columns with equal
    names share one label.
    """
    text = text or [
        [f"{a}, {b}: {number(float(v), 2)}" for b, v in zip(columns, row, strict=True)]
        for a, row in zip(rows, values, strict=True)
    ]
    figure = blank(height or 90 + 26 * len(rows), legend=False)
    bar = {"thickness": 8, "len": 0.95, "outlinewidth": 0, "tickfont": {"size": 10, "color": FAINT}}
    numbers: dict[str, Any] = {"texttemplate": "%{z:.2f}", "textfont": {"size": 10}} if len(columns) <= 8 else {}
    figure.add_heatmap(
        z=[[None if not np.isfinite(v) else round(float(v), 4) for v in row] for row in values],
        zmin=-limit,
        zmax=limit,
        colorscale=SCALES["signed"],
        colorbar=bar,
        text=text,
        hovertemplate="%{text}<extra></extra>",
        **numbers,
        xgap=1 if len(columns) <= 32 else 0,
        ygap=1,
    )
    starts = [i for i, name in enumerate(columns) if i and name != columns[i - 1]]
    if len(starts) + 1 < len(columns):
        for start in starts:
            figure.add_vline(start - 0.5, line={"color": FAINT, "width": 1})
    names = list(dict.fromkeys(columns))
    middles = [float(np.mean([i for i, other in enumerate(columns) if other == name])) for name in names]
    quiet = {"showgrid": False, "zeroline": False, "ticks": "", "tickfont": {"size": 11}}
    figure.update_xaxes(tickvals=middles, ticktext=names, **quiet)
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=list(rows), autorange="reversed", **quiet)
    return figure


# --------------------------------------------------------------------------------------------------------------- codes
def code_map(found: CodeMap, colour_by: str, names: dict[int, str]) -> go.Figure:
    """The t-SNE map of one layer (the page also has the PCA).  `names`: the names of a label's classes."""
    figure = blank(230, legend=False)
    right = 40 if colour_by == "target" else 4
    plain = {"visible": False, "showgrid": False, "zeroline": False}
    figure.update_layout(margin={"l": 4, "r": right, "t": 4, "b": 4}, xaxis=plain, yaxis=plain)
    marker, text = _target_marks(found) if colour_by == "target" else _class_marks(found.labels[colour_by], names)
    x, y = coordinates(found, "tsne")
    figure.add_scatter(x=x, y=y, mode="markers", marker=marker, text=text, hovertemplate="%{text}<extra></extra>")
    return figure


def coordinates(found: CodeMap, method: str) -> tuple[list[float], list[float]]:
    """x and y of a map, rounded to less than a pixel."""
    points = found.points[method]
    extent = float(np.abs(points).max()) or 1.0
    x, y = np.round(points / extent, 3).T.tolist()
    return x, y


def _target_marks(found: CodeMap) -> tuple[dict[str, Any], list[str]]:
    values = [round(float(v), 3) for v in found.number]
    ends = [min(values), max(values)]
    bar = {"thickness": 8, "len": 0.9, "outlinewidth": 0, "tickfont": {"size": 10, "color": FAINT}, "x": 1.0}
    bar |= {"tickvals": ends, "ticktext": [f"{value:.2f}".removesuffix(".00") for value in ends]}
    marker = {"size": 5, "color": values, "colorscale": "Cividis", "showscale": True, "colorbar": bar}
    return marker, [f"target {v:g}" for v in values]


def _class_marks(labels: np.ndarray, names: dict[int, str]) -> tuple[dict[str, Any], list[str]]:
    marks = [category(int(label)) for label in labels]
    marker = {"size": 6, "color": [m[0] for m in marks], "symbol": [m[1] for m in marks], "opacity": 0.85}
    return marker, [names.get(int(label), f"class {label}") for label in labels]
