"""Figures and tables of the dual-attention study: scores over the size of the training set, or model by model.

A table has a line per model and place: how many parameters it has, how many steps it was trained, what it reached.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from polyhead import claims_dual
from polyhead.analysis import figures
from polyhead.claims import Verdict
from polyhead.recipes.dual_models import ROWS
from polyhead.reproduce.outcome import Outcome, both, by_model, numbers, scores, series, setting_text, whole
from polyhead.reproduce.study import Cell, Study, label

Cells = Mapping[tuple[Any, ...], Mapping[str, Cell]]
Panel = tuple[str, Mapping[str, Mapping[Any, list[float]]], Mapping[str, Any]]
CHANCE = {"chance": 0.5}
SPLITS = {"iid": "pentominoes", "novel_hexominoes": "hexominoes", "novel_stripes": "stripes"}


def games(study: Study, folder: pathlib.Path) -> Outcome:
    """Accuracy over the number of training images, a panel per game: pentominoes, and the two unseen sets of shapes."""
    cells = by_model(study, "game", "examples")
    pictures = []
    for split, words in SPLITS.items():
        stem = "games" if split == "iid" else f"games-{words}"
        _draw(cells, split, folder / stem)
        unseen = "" if split == "iid" else ", never seen in training"
        pictures.append((stem, f"Accuracy on {words}{unseen}; standard errors over seeds, a dot per seed."))
    return Outcome(
        pictures=tuple(pictures),
        **_games_table(cells),
        verdicts=tuple(_games_verdicts(cells)),
    )


def _draw(cells: Cells, split: str, stem: pathlib.Path) -> None:
    panels: list[Panel] = []
    for game in dict.fromkeys(place[0] for place in cells):
        points = {n: scores(by, split) for (name, n), by in cells.items() if name == game}
        panels.append((str(game).replace("_", " "), series(points), CHANCE))
    for path in both(stem.name, stem.parent):
        figures.lines(panels, path, x_label="training images", y_label="accuracy", log_x=True, limits=(0.4, 1.02))


def _games_table(cells: Cells) -> dict[str, Any]:
    head = ("game", "images", "model", *SPLITS.values(), "the paper's pentominoes", "parameters", "steps")
    rows, found = [], {}
    for (game, n), by in cells.items():
        for model, cell in by.items():
            values = [str(cell.score(split)) for split in SPLITS]
            rows.append(
                (game, f"{n}", label(model), *values, paper(claims_dual.GAMES[game].get(model, {})), *size(cell))
            )
        found[f"{game}, {n} images"] = {
            m: {split: numbers(cell.score(split)) for split in SPLITS} for m, cell in by.items()
        }
    return {"head": head, "rows": tuple(rows), "numbers": found, "notes": notes(cells)}


def _games_verdicts(cells: Cells) -> list[Verdict]:
    """Of the games that are whole: where runs failed, a verdict would be of other settings than it says."""
    every = {name: {n: by for (game, n), by in cells.items() if game == name} for name, _ in cells}
    mine = {name: of for name, of in every.items() if whole({(n,): by for n, by in of.items()})}
    curves = {name: {n: scores(by, "iid") for n, by in of.items()} for name, of in mine.items()}
    verdicts = [verdict for name, curve in curves.items() for verdict in claims_dual.game(name, curve)]
    if not curves:
        return verdicts
    unseen = [split for split in SPLITS if split != "iid"]
    novel = {split: {name: scores(of[max(of)], split) for name, of in mine.items()} for split in unseen}
    return verdicts + claims_dual.all_games(curves, novel)


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
