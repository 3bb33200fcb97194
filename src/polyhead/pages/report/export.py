"""The figures of a report as PNG and SVG files, drawn with matplotlib from the same numbers."""

import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhead.analysis import figures
from polyhead.analysis.geometry import means, similarity
from polyhead.pages.report import headline as text, sections as shown
from polyhead.pages.report.attention import Example, Looked
from polyhead.pages.report.attention_section import still
from polyhead.pages.report.code_figures import Cells, probe_cells, purity_cells
from polyhead.pages.report.codes import Analysed, class_names, head_names, samples
from polyhead.pages.report.runs import Group, Summary, headline

FORMATS = ("png", "svg")
Draw = Callable[[pathlib.Path], Any]
Files = dict[str, Draw]
Table = dict[str, dict[str, Summary]]


def draw(
    directory: pathlib.Path,
    found: Sequence[Group],
    splits: Sequence[str],
    table: Table,
    analysed: Sequence[Analysed],
    looked: Sequence[Looked],
    *,
    formats: Sequence[str] = FORMATS,
) -> list[pathlib.Path]:
    """Write every figure into `directory` in every format; returns the files in the order of the report."""
    wanted = _results(found, table) | _curves(found, splits, table) | _looks(looked) | _probes(analysed)
    for one in analysed:
        if one.maps:
            wanted |= _zeroed(one) | _alike(one) | _maps(one)
    try:
        return [make(directory / f"{name}.{kind}") for name, make in wanted.items() for kind in formats]
    except OSError as error:
        raise ValueError(f"report: {directory} cannot be written ({error.strerror})") from None


def _results(found: Sequence[Group], table: Table) -> Files:
    order = text.ranked(found)
    if not order:
        return {}
    measured = {group.label: list(score.values) for group, score in order}
    errors = {group.label: score.error or 0.0 for group, score in order}
    split = headline(found)
    task = order[0][0].task
    floors = {text.floor(task, name).label: row[split].mean for name, row in table.items() if split in row}
    metric = f"{text.metric_name(task.metric)} on {text.where(found)}"
    return {"results": lambda path: figures.results(measured, path, errors=errors, floors=floors, score=metric)}


def _curves(found: Sequence[Group], splits: Sequence[str], table: Table) -> Files:
    task, metric = found[0].task, found[0].task.metric
    files: Files = {}
    for name, kind, value, split in [("loss", "train", "loss", None), *((s, "eval", metric, s) for s in splits)]:
        series = {group.label: by_step for group in found if (by_step := _by_step(group, kind, value, split))}
        levels = {text.floor(task, n).label: row[split].mean for n, row in table.items() if split in row}
        words = "training loss" if split is None else f"{text.split_name(split)} {text.metric_name(metric)}"
        if series:
            files[f"curves-{name}"] = _line([("", series, levels)], "optimiser step", words)
    return files


def _by_step(group: Group, kind: str, value: str, split: str | None) -> dict[int | float, list[float]]:
    """The values of all seeds, by step."""
    points: dict[int | float, list[float]] = {}
    for entry in group.entries:
        for step, y in zip(*entry.curve(kind, value, split), strict=True):
            points.setdefault(step, []).append(y)
    return points


def _line(panels: Sequence[tuple[str, Any, Any]], x: str, y: str) -> Draw:
    return lambda path: figures.lines(panels, path, x_label=x, y_label=y)


def _probes(analysed: Sequence[Analysed]) -> Files:
    """Probes and purity over layers, one panel per target."""
    kinds = dict.fromkeys((row["pairs"], row["query"]) for one in analysed for row in one.rows)
    files = {
        f"probes-{view}-{query}": _over_layers(probe_cells(analysed, view, query), "macro F1") for view, query in kinds
    }
    views = dict.fromkeys(view for one in analysed for view in one.views)
    return files | {f"clusters-{view}": _over_layers(purity_cells(analysed, view), "purity") for view in views}


def _over_layers(cells: Cells, what: str) -> Draw:
    panels = []
    for target in dict.fromkeys(target for _, (_, target) in cells):
        series: dict[str, dict[int, list[float]]] = {}
        levels: dict[int, list[float]] = {}
        for (label, (layer, name)), (score, level, _) in cells.items():
            if name == target:
                series.setdefault(label, {})[layer + 1] = list(score.values)
                levels.setdefault(layer + 1, []).append(level)
        chance = {layer: float(np.mean(each)) for layer, each in levels.items()}  # of all mechanisms, as in the page
        panels.append((target, series, {"chance": chance}))
    return _line(panels, "layer", what)


def _zeroed(one: Analysed) -> Files:
    values, _, layers, heads = shown.drops(one.zeroed)
    label = f"fall of {text.metric_name(one.group.task.metric)}"
    panel = (f"{one.name}: one head zeroed", values, layers, heads)
    return {f"heads-{_slug(one)}": lambda path: figures.heat([panel], path, label=label)}


def _alike(one: Analysed) -> Files:
    """Draw the similarity of rules by layer, and sampled and mean codes of the last layer (Schug et al., 5E and A8)."""
    files: Files = {}
    for view in one.views:
        layers = one.layers(view)
        if "rule" not in layers[0].labels:
            continue
        panels, last = [], layers[-1]
        for centred in (False, True):
            for layer in layers:
                classes, values = similarity(layer.codes, layer.labels["rule"], centred=centred)
                names = shown.rule_names(one, classes)
                panels.append((f"layer {layer.layer + 1}{', centred' * centred}", values, names, names))
        words = "cosine similarity of mean codes"
        files[f"alike-{_slug(one)}-{view}"] = _heat(panels, words, (-1, 1), len(layers))
        both = {"sampled codes": samples(last, "rule"), "mean codes": _means(last)}.items()
        heads = head_names(one.entry, last)
        parts = [(f"layer {last.layer + 1}, {name}", c.T, heads, shown.rule_names(one, y)) for name, (c, y) in both]
        files[f"codes-{_slug(one)}-{view}"] = _heat(parts, "latent code", None, 2)
    return files


def _means(layer: Any) -> tuple[np.ndarray, np.ndarray]:
    classes, codes = means(layer.codes, layer.labels["rule"])
    return codes, classes


def _heat(panels: Sequence[Any], label: str, limits: tuple[int, int] | None, columns: int) -> Draw:
    return lambda path: figures.heat(panels, path, label=label, limits=limits, columns=columns)


def _maps(one: Analysed) -> Files:
    """Draw one file per view and layer: t-SNE above, PCA below, coloured by the target and by each label."""
    files: Files = {}
    for layer in one.maps:
        panels: list[tuple[str, Any, Any]] = []
        names = {}
        for method, words in (("tsne", "t-SNE"), ("pca", "PCA")):
            panels.append((f"{words}, by target", layer.points[method], layer.number))
            for label, values in layer.labels.items():
                panels.append((f"{words}, by {label}", layer.points[method], values))
                if len(np.unique(values)) <= 16:
                    names[f"{words}, by {label}"] = class_names(one.entry.run.task, layer, label)
        files[f"map-{_slug(one)}-{layer.view}-layer{layer.layer + 1}"] = _map(panels, names, 1 + len(layer.labels))
    return files


def _map(panels: Any, names: dict[str, dict[int, str]], columns: int) -> Draw:
    return lambda path: figures.code_maps(panels, path, columns=columns, names=names)


def _looks(looked: Sequence[Looked]) -> Files:
    """Draw attention, relations and symbols of each mechanism's first example, one file per layer and kind."""
    files: Files = {}
    for one in looked:
        for example in one.examples[:1]:
            for name, (label, panels) in still(example).items():
                files[f"look-{_slug(one)}-{name}"] = _look(panels, label, example)
    return files


def _look(panels: Sequence[Any], label: str, example: Example) -> Draw:
    columns = 4 if max(panels[0][1].shape) <= 16 else 2
    return lambda path: figures.heat(
        panels, path, label=label, columns=columns, grouped=False, numbers=False, picture=example.image
    )


def _slug(one: Analysed | Looked) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", one.name.lower()).strip("-")
