"""Learning curves of the dual-attention study: scores over the size of the training set, or over optimiser steps.

A table has a line per model and place: what it reached, beside the paper's, with how many parameters and steps.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyhead.analysis import figures
from polyhead.papers.dual import claims as claims_dual
from polyhead.papers.dual.models import ROWS
from polyhead.papers.hyla.claims import Verdict
from polyhead.papers.outcome import Outcome, beside, both, by_model, numbers, scores, series, setting_text, whole
from polyhead.papers.study import Cell, Study, label

Cells = Mapping[tuple[Any, ...], Mapping[str, Cell]]
Panel = tuple[str, Mapping[str, Mapping[Any, list[float]]], Mapping[str, Any]]
Printed = Callable[[tuple[Any, ...], str], str]
"""What the paper prints of a place and a model."""
Columns = Sequence[tuple[str, str, str | None]]
"""Head, split, and metric (None: the task's own)."""
GAMES = (("pentominoes", "iid", None), ("hexominoes", "novel_hexominoes", None), ("stripes", "novel_stripes", None))
SEEN = "standard errors over seeds, a dot per seed"


def games(study: Study, folder: pathlib.Path) -> Outcome:
    """Accuracy over the number of training images, a panel per game: pentominoes, and the two unseen sets of shapes."""
    cells = by_model(study, "game", "examples")
    pictures = []
    for words, split, _ in GAMES:
        stem = "games" if split == "iid" else f"games-{words}"
        by_examples(cells, split, folder / stem, "training images", 0.5)
        unseen = "" if split == "iid" else ", never seen in training"
        pictures.append((stem, f"Accuracy on {words}{unseen}; {SEEN}."))
    found = table(cells, ("game", "images"), GAMES, lambda at, m: paper(claims_dual.GAMES[at[0]].get(m, {})))
    return Outcome(pictures=tuple(pictures), **found, verdicts=tuple(_games_verdicts(cells)))


def _games_verdicts(cells: Cells) -> list[Verdict]:
    """Of the games that are whole: where runs failed, a verdict would be of other settings than it says."""
    every = {name: {n: by for (game, n), by in cells.items() if game == name} for name, _ in cells}
    mine = {name: of for name, of in every.items() if whole({(n,): by for n, by in of.items()})}
    curves = {name: {n: scores(by, "iid") for n, by in of.items()} for name, of in mine.items()}
    verdicts = [verdict for name, curve in curves.items() for verdict in claims_dual.game(name, curve)]
    if not curves:
        return verdicts
    unseen = [split for _, split, _ in GAMES if split != "iid"]
    novel = {split: {name: scores(of[max(of)], split) for name, of in mine.items()} for split in unseen}
    return verdicts + claims_dual.all_games(curves, novel)


def sorting(study: Study, folder: pathlib.Path) -> Outcome:
    """Whole orders that are right, over the number of training sequences."""
    placed = by_model(study, "task", "examples")
    by_examples(placed, "iid", folder / "sorting", "training sequences", 0.0)
    cells = {place[1:]: by for place, by in placed.items()}
    columns = (("sorted", "iid", None), ("elements", "iid", "element_accuracy"), ("noisy objects", "novel", None))
    verdicts: list[Verdict] = []
    if whole(cells):
        curve = {n: scores(by, "iid") for (n,), by in cells.items()}
        verdicts = claims_dual.learns("sorting", curve)
        at = {f"n {n}": found for n, found in curve.items()}
        verdicts += claims_dual.better("sorting", "abstractor", ("softmax", "dual"), at)
    caption = f"Sequences sorted without a mistake, as a decoder writes them; {SEEN}."
    found = table(cells, ("sequences",), columns)
    return Outcome(pictures=(("sorting", caption),), **found, verdicts=tuple(verdicts))


def course(
    axis: str, columns: Columns, claim: Callable[[Cells], list[Verdict]], printed: Printed
) -> Callable[[Study, pathlib.Path], Outcome]:
    """A figure of the score on `validation` over optimiser steps, a panel per value of `axis`, and the table."""

    def draw(study: Study, folder: pathlib.Path) -> Outcome:
        cells = by_model(study, axis)
        panels: list[Panel] = []
        for (value,), by in cells.items():
            name = str(value).partition("__")[2] or str(value)
            panels.append(
                (
                    name.replace("_", " "),
                    {label(m): cell.course("validation") for m, cell in by.items()},
                    means(by, "validation"),
                )
            )
        metric = study.points[0].run.task.metric.replace("_", " ")
        for path in both(study.figure, folder):
            figures.lines(panels, path, x_label="optimiser steps", y_label=metric, limits=(0.0, 1.02))
        caption = f"{metric.capitalize()} on validation data in the course of training; {SEEN}."
        verdicts = claim(cells) if whole(cells) else []
        found = table(cells, (axis,), columns, printed)
        return Outcome(pictures=((study.figure, caption),), **found, verdicts=tuple(verdicts))

    return draw


def by_examples(cells: Cells, split: str, stem: pathlib.Path, x_label: str, chance: float) -> None:
    """A panel per first place, over the second: the number of examples."""
    panels: list[Panel] = []
    for name in dict.fromkeys(place[0] for place in cells):
        points = {n: scores(by, split) for (which, n), by in cells.items() if which == name}
        levels: dict[str, Any] = {"chance": chance} if chance else {}
        for n, by in ((n, by) for (which, n), by in cells.items() if which == name):
            for floor, value in means(by, split).items():
                levels.setdefault(floor, {})[n] = value
        panels.append((str(name).replace("_", " "), series(points), levels))
    low = chance - 0.1 if chance else 0.0
    for path in both(stem.name, stem.parent):
        figures.lines(panels, path, x_label=x_label, y_label="accuracy", log_x=True, limits=(low, 1.02))


def means(by: Mapping[Any, Cell], split: str) -> dict[str, float]:
    """Of the floors beside these cells."""
    return {name: level.mean for name, level in beside(by, split).items()}


def table(cells: Cells, axes: tuple[str, ...], columns: Columns, printed: Printed | None = None) -> dict[str, Any]:
    """A line per place and model, and below the models of a place one per floor."""
    head = (*axes, "model", *(name for name, _, _ in columns), *(["paper"] if printed else []), "parameters", "steps")
    rows, found = [], {}
    for place, by in cells.items():
        where = [str(value).replace("__", ": ").replace("_", " ") for value in place]
        for model, cell in by.items():
            values = [str(cell.score(split, metric)) for _, split, metric in columns]
            own = [printed(place, model)] if printed else []
            rows.append((*where, label(model), *values, *own, *size(cell)))
        found[", ".join(map(str, place))] = {
            model: {name: numbers(cell.score(split, metric)) for name, split, metric in columns}
            for model, cell in by.items()
        }
        levels = {name: beside(by, split) for name, split, metric in columns if metric is None}
        for floor in dict.fromkeys(floor for found_ in levels.values() for floor in found_):
            mine = {name: of[floor] for name, of in levels.items() if floor in of}
            values = [str(mine.get(name, "–")) for name, _, _ in columns]
            rows.append((*where, floor, *values, *["–"] * (len(head) - len(where) - 1 - len(values))))
            found[", ".join(map(str, place))][floor] = {name: numbers(level) for name, level in mine.items()}
    return {"head": head, "rows": tuple(rows), "numbers": found, "notes": notes(cells)}


def paper(values: Mapping[int, float]) -> str:
    """What the paper prints, by the size of its training set."""
    return ", ".join(f"{value:.3f} ({n})" for n, value in values.items()) or "–"


def size(cell: Cell) -> tuple[str, str]:
    """Parameters and optimiser steps of a cell."""
    counts = {point.result.parameters for point in cell.points}
    steps = {point.run.train.steps for point in cell.points}
    return " / ".join(f"{n:,}" for n in sorted(counts)), " / ".join(f"{n:,}" for n in sorted(steps))


def notes(cells: Cells) -> tuple[str, ...]:
    """The settings, and how models are read where the papers are silent."""
    ran = {model for by in cells.values() for model in by}
    settings = sorted({setting_text(cell) for by in cells.values() for cell in by.values()})
    return (
        *(f"{row.label}: {row.choice}." for name, row in ROWS.items() if row.choice and name in ran),
        f"Settings: {'; '.join(settings)}.",
    )
