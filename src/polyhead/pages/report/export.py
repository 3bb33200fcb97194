"""The figures of a report as PNG and SVG files, drawn with matplotlib from the same numbers."""

import pathlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from polyhead.analysis import figures
from polyhead.config import Task
from polyhead.pages.report import headline as text, sections as shown
from polyhead.pages.report.attention import CheckpointExamples
from polyhead.pages.report.attention_section import still
from polyhead.pages.report.code_figures import Cells, probe_cells, purity_cells
from polyhead.pages.report.codes import Array, CheckpointAnalysis, class_names
from polyhead.pages.report.runs import SeedGroup, Table, headline

FORMATS = ("png", "svg")
Draw = Callable[[], Any]
Files = dict[str, Draw]


def draw(
    directory: pathlib.Path,
    found: Sequence[SeedGroup],
    splits: Sequence[str],
    table: Table,
    analysed: Sequence[CheckpointAnalysis],
    looked: Sequence[CheckpointExamples],
    *,
    formats: Sequence[str] = FORMATS,
) -> list[pathlib.Path]:
    """Write every figure into `directory` in every format; returns the files in the order of the report."""
    wanted = _results(found, table) | _curves(found, splits, table) | _looks(looked) | _probes(analysed)
    for one in analysed:
        if one.maps:
            wanted |= _zeroed(one) | _alike(one) | _maps(one)
    try:
        return [figures.save(make(), directory / f"{name}.{kind}") for name, make in wanted.items() for kind in formats]
    except OSError as error:
        raise ValueError(f"report: {directory} cannot be written ({error.strerror})") from None


def _results(found: Sequence[SeedGroup], table: Table) -> Files:
    order = text.ranked(found)
    if not order:
        return {}
    measured = {group.label: list(score.values) for group, score in order}
    errors = {group.label: score.error or 0.0 for group, score in order}
    words = f"{text.metric_name(found[0].task.metric)} on {text.where(found)}"
    floors = _levels(found[0].task, table, headline(found))
    return {"results": partial(figures.results, measured, errors=errors, baselines=floors, score=words)}


def _levels(task: Task, table: Table, split: str | None) -> dict[str, float]:
    """The floors and the ceiling of a split, by their names in a figure."""
    return {text.floor(task, name).label: row[split].mean for name, row in table.items() if split in row}


def _curves(found: Sequence[SeedGroup], splits: Sequence[str], table: Table) -> Files:
    task, metric = found[0].task, found[0].task.metric
    files: Files = {}
    for name, kind, value, split in [("loss", "train", "loss", None), *((s, "eval", metric, s) for s in splits)]:
        series = {group.label: by_step for group in found if (by_step := _by_step(group, kind, value, split))}
        words = "training loss" if split is None else f"{text.split_name(split)} {text.metric_name(metric)}"
        if series:
            panel = ("", series, _levels(task, table, split))
            files[f"curves-{name}"] = partial(figures.lines, [panel], x_label="optimiser step", y_label=words)
    return files


def _by_step(group: SeedGroup, kind: str, value: str, split: str | None) -> dict[figures.Number, list[float]]:
    """The values of all seeds, by step."""
    points: dict[figures.Number, list[float]] = {}
    for entry in group.entries:
        for step, y in zip(*entry.curve(kind, value, split), strict=True):
            points.setdefault(step, []).append(y)
    return points


def _probes(analysed: Sequence[CheckpointAnalysis]) -> Files:
    """Probes and purity over layers, one panel per target."""
    kinds = dict.fromkeys((row["pairs"], row["query"]) for one in analysed for row in one.rows)
    views = dict.fromkeys(view for one in analysed for view in one.views)
    files = {f"probes-{v}-{query}": _over_layers(probe_cells(analysed, v, query), "macro F1") for v, query in kinds}
    return files | {f"clusters-{v}": _over_layers(purity_cells(analysed, v), "purity") for v in views}


def _over_layers(cells: Cells, what: str) -> Draw:
    panels: list[tuple[str, figures.Series, figures.Levels]] = []
    for target in dict.fromkeys(target for _, (_, target) in cells):
        series: dict[str, dict[figures.Number, list[float]]] = {}
        levels: dict[figures.Number, list[float]] = {}
        for (label, (layer, name)), (score, level) in cells.items():
            if name == target:
                series.setdefault(label, {})[layer + 1] = list(score.values)
                levels.setdefault(layer + 1, []).append(level)
        chance = {layer: float(np.mean(each)) for layer, each in levels.items()}  # of all mechanisms, as in the page
        panels.append((target, series, {"chance": chance}))
    return partial(figures.lines, panels, x_label="layer", y_label=what)


def _zeroed(one: CheckpointAnalysis) -> Files:
    values, _, layers, heads = shown.drops(one.zeroed)
    label = f"fall of {text.metric_name(one.group.task.metric)}"
    panel = (f"{one.name}: one head zeroed", values, layers, heads)
    return {f"heads-{_slug(one)}": partial(figures.heat, [panel], label=label)}


def _alike(one: CheckpointAnalysis) -> Files:
    """Draw the similarity of rules by layer, and codes by rule."""
    files: Files = {}
    for view in one.views:
        if "rule" in one.layers(view)[0].labels:
            plain, centred = shown.alike(one, view)
            heat = partial(figures.heat, label="cosine similarity of mean codes", limits=(-1, 1), columns=len(plain))
            files[f"alike-{_slug(one)}-{view}"] = partial(heat, [*plain, *centred])
            codes = shown.by_rule(one, view)
            files[f"codes-{_slug(one)}-{view}"] = partial(figures.heat, codes, label="latent code", columns=2)
    return files


def _maps(one: CheckpointAnalysis) -> Files:
    """Draw one file per view and layer: t-SNE above, PCA below, coloured by the target and by each label."""
    files: Files = {}
    for layer in one.maps:
        panels: list[tuple[str, Array, Array]] = []
        names = {}
        for method, words in (("tsne", "t-SNE"), ("pca", "PCA")):
            for label, values in {"target": layer.number, **layer.labels}.items():
                panels.append((f"{words}, by {label}", layer.points[method], values))
                if label != "target" and len(np.unique(values)) <= 16:
                    names[f"{words}, by {label}"] = class_names(one.entry.run.task, layer, label)
        draw = partial(figures.code_maps, panels, columns=1 + len(layer.labels), names=names)
        files[f"map-{_slug(one)}-{layer.view}-layer{layer.layer + 1}"] = draw
    return files


def _looks(looked: Sequence[CheckpointExamples]) -> Files:
    """Draw attention, relations and symbols of each mechanism's first example, one file per layer and kind."""
    heat = partial(figures.heat, grouped=False, numbers=False)
    return {
        f"look-{_slug(one)}-{name}": partial(
            heat, panels, label=label, columns=4 if max(panels[0][1].shape) <= 16 else 2, picture=example.image
        )
        for one in looked
        for example in one.examples[:1]
        for name, (label, panels) in still(example).items()
    }


def _slug(one: CheckpointAnalysis | CheckpointExamples) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", one.name.lower()).strip("-")
