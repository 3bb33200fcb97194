"""Figures that are scores over an axis: 2C and A3 (fuzzy logic), 4, A4, 5C, 5D and A5 (SRAVEN)."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from polyhead.analysis import figures
from polyhead.papers.hyla import claims
from polyhead.papers.hyla.claims import Estimate, Verdict
from polyhead.papers.outcome import (
    Outcome,
    both,
    by_model,
    drawn,
    floors,
    numbers,
    runs_of,
    scores,
    series,
    setting_text,
    shown,
    whole,
)
from polyhead.papers.study import Cell, Study, label

Cells = dict[tuple[Any, ...], dict[str, Cell]]
Panel = tuple[str, Mapping[str, Mapping[Any, list[float]]], Mapping[str, Any]]
TRAINING = (
    "Recall and mixture know no terms: the training functions, weighed by how well they fit the examples, and their "
    "best linear mixture. Every floor is a mean over the splits of the seeds."
)


def fig_2c(study: Study, folder: pathlib.Path) -> Outcome:
    """Compositional R² by context length, a panel per fraction held out."""
    cells = by_model(study, "length", "held out")
    levels = {place: floors(runs_of(cell)) for place, cell in cells.items()}
    draw_fuzzy(cells, "compositional", folder / "fig-2c", levels)
    verdicts = _fuzzy_verdicts(cells)[:1]
    caption = f"Compositional R² by examples in the context; standard errors over seeds, a dot per seed. {TRAINING}"
    return Outcome(
        pictures=(("fig-2c", caption),),
        **_fuzzy_table(cells, levels, ("compositional",)),
        verdicts=tuple(verdicts),
    )


def fig_a3(study: Study, folder: pathlib.Path) -> Outcome:
    """A: compositional, B: training tasks, C: novel terms, D: training error."""
    cells = by_model(study, "length", "held out")
    pictures = []
    parts = (
        ("a", "compositional", "unseen combinations"),
        ("b", "iid", "training tasks"),
        ("c", "novel", "unknown terms"),
    )
    levels: dict[Any, Any] = {}
    for letter, split, words in parts:
        levels = {place: floors(runs_of(cell), split) for place, cell in cells.items()}
        draw_fuzzy(cells, split, folder / f"fig-a3{letter}", levels)
        pictures.append((f"fig-a3{letter}", f"{letter.upper()}: R² on {words}. {TRAINING}"))
    draw_fuzzy(cells, "training loss", folder / "fig-a3d", {})
    pictures.append(("fig-a3d", "D: mean squared error on training batches, the last logged ones."))
    verdicts = _fuzzy_verdicts(cells)
    biggest = max(cells, default=None)
    if biggest is not None:  # `levels` are those of the novel split
        novel = scores(cells[biggest], "novel")
        where = f"{biggest[0]} tokens, {100 * biggest[1]:.0f} % held out"
        verdicts += claims.novel(where, novel, levels[biggest]["gaussian_process"])
    table = _fuzzy_table(cells, {}, ("compositional", "iid", "novel", "training loss"))
    return Outcome(pictures=tuple(pictures), **table, verdicts=tuple(verdicts))


def _value(cell: Cell, split: str) -> Estimate:
    return cell.training_loss() if split == "training loss" else cell.score(split)


def draw_fuzzy(cells: Cells, split: str, stem: pathlib.Path, levels: Mapping[Any, Any]) -> None:
    """One panel per fraction held out, over the length of the context."""
    panels: list[Panel] = []
    for held in sorted({place[1] for place in cells}):
        mine = {place[0]: cell for place, cell in sorted(cells.items()) if place[1] == held}
        points = {n: {model: _value(cell, split) for model, cell in by.items()} for n, by in mine.items()}
        lines: dict[str, dict[int, float]] = {}
        for n in mine:
            for name, value in drawn(runs_of(mine[n]), levels.get((n, held), {})).items():
                lines.setdefault(name, {})[n] = value
        panels.append((f"{100 * held:.0f} % held out", series(points), lines))
    limits = (None, None) if split in ("novel", "training loss") else (0.0, 1.02)
    y = "training error" if split == "training loss" else "R²"
    for path in both(stem.name, stem.parent):
        figures.lines(panels, path, x_label="tokens in the context", y_label=y, log_x=True, limits=limits)


def _fuzzy_table(cells: Cells, levels: Mapping[Any, Any], splits: tuple[str, ...]) -> dict[str, Any]:
    models = list(dict.fromkeys(model for cell in cells.values() for model in cell))
    head = ("setting", *(f"{label(m)}, {split}" for split in splits for m in models))
    common = shown((run for by in cells.values() for run in runs_of(by)), next(iter(levels.values()), {}))
    head += tuple(common.values())
    rows = []
    for (n, held), by in sorted(cells.items()):
        row = [f"N {n}, {100 * held:.0f} % held out"]
        row += [str(_value(by[m], split)) if m in by else "–" for split in splits for m in models]
        row += [str(levels[n, held][name]) for name in common]
        rows.append(tuple(row))
    found = {
        f"N {n}, held out {held}": {m: {s: numbers(_value(cell, s)) for s in splits} for m, cell in by.items()}
        for (n, held), by in cells.items()
    }
    settings = sorted({setting_text(cell) for by in cells.values() for cell in by.values()})
    return {"head": head, "rows": tuple(rows), "numbers": found, "notes": (f"Settings: {'; '.join(settings)}.",)}


def _fuzzy_verdicts(cells: Cells) -> list[Verdict]:
    if not whole(cells) or len({held for _, held in cells}) < 2:
        return []
    most = max(held for _, held in cells)
    outside = {(n, held): scores(cell, "compositional") for (n, held), cell in cells.items()}
    verdicts = claims.fig_2c(outside)
    at = [n for n, held in cells if held == most]
    inside = {m: claims.mean([scores(cells[n, most], "iid")[m] for n in at]) for m in cells[at[0], most]}
    beyond = {m: claims.mean([outside[n, most][m] for n in at]) for m in inside}
    return verdicts + claims.small_gaps(inside, beyond)


# -------------------------------------------------------------------------------------------------------------- SRAVEN
def scaling(axis: str) -> Callable[[Study, pathlib.Path], Outcome]:
    """Fig. 4A (axis "width"), 4A with the code's heads, 4B ("depth"): accuracy by training instances."""

    def draw(study: Study, folder: pathlib.Path) -> Outcome:
        cells = by_model(study, axis, "instances")
        stem = study.figure
        runs = [point.run for point in study.points]
        levels = floors(runs)
        _draw_scaling(cells, axis, "compositional", folder / stem, drawn(runs, levels))
        order = sorted(cells, key=lambda place: (place[1], place[0]))
        found = {place: scores(cells[place], "compositional") for place in order}
        verdicts = claims.solves(found) if whole(cells) else []
        caption = f"Compositional accuracy by training instances, a panel per {axis}."
        table = _table(cells, (axis, "instances"), levels)
        return Outcome(pictures=((stem, caption),), **table, verdicts=tuple(verdicts))

    return draw


def fig_a4(study: Study, folder: pathlib.Path) -> Outcome:
    """Training loss by instances: by width at the common depth, by depth at the common width."""
    depths, widths = (sorted(place[0] for place in study.cells(axis)) for axis in ("depth", "width"))
    pictures = []
    base = {
        "width": _most(study, "depth", depths),
        "depth": _most(study, "width", widths),
    }
    found: dict[str, Any] = {}
    for letter, axis, other in (("a", "width", "depth"), ("b", "depth", "width")):
        chosen = by_model(study, axis, "instances", other)
        cells = {place[:2]: cell for place, cell in chosen.items() if place[2] == base[axis]}
        _draw_scaling(cells, axis, "training loss", folder / f"fig-a4{letter}", {})
        pictures.append((f"fig-a4{letter}", f"{letter.upper()}: cross-entropy on the last training batches by {axis}."))
        found |= _table(cells, (axis, "instances"), {}, "training loss")["numbers"]
    return Outcome(pictures=tuple(pictures), numbers=found)


def _most(study: Study, axis: str, values: list[Any]) -> Any:
    """The value of `axis` that most runs have: the one that stays while the other axis is varied."""
    from polyhead.papers.study import AXES

    counts = {value: sum(AXES[axis](point.run) == value for point in study.points) for value in values}
    return max(counts, key=lambda value: counts[value])


def _draw_scaling(cells: Cells, axis: str, split: str, stem: pathlib.Path, levels: Mapping[str, float]) -> None:
    panels: list[Panel] = []
    for value in sorted({place[0] for place in cells}):
        mine = {place[1]: cell for place, cell in sorted(cells.items()) if place[0] == value}
        points = {x: {m: _value(cell, split) for m, cell in by.items()} for x, by in mine.items()}
        panels.append((f"{axis} {value:g}", series(points), levels))
    y, limits = ("training loss", (None, None)) if split == "training loss" else ("accuracy", (0.0, 1.02))
    for path in both(stem.name, stem.parent):
        figures.lines(panels, path, x_label="training instances", y_label=y, log_x=True, limits=limits)


def over(axis: str, claim: Callable[[Mapping[Any, Any]], list[Verdict]]) -> Callable[[Study, pathlib.Path], Outcome]:
    """Fig. 5C ("heads"), 5D ("features"), A5 ("held out"): accuracy over one axis."""

    def draw(study: Study, folder: pathlib.Path) -> Outcome:
        cells = by_model(study, axis)
        found: dict[str, dict[Any, float]] = {}
        for (x,), cell in cells.items():
            for name, value in drawn(runs_of(cell), floors(runs_of(cell))).items():
                found.setdefault(name, {})[x] = value
        points = {x: scores(cell, "compositional") for (x,), cell in sorted(cells.items())}
        panel: Panel = ("", series(points), found)
        for path in both(study.figure, folder):
            figures.lines([panel], path, x_label=axis, y_label="accuracy", limits=(0.0, 1.02))
        verdicts = claim(points) if whole(cells) and len(cells) > 1 else []
        caption = f"Compositional accuracy by {axis}; standard errors over seeds, a dot per seed."
        table = _table(cells, (axis,), {})
        return Outcome(pictures=((study.figure, caption),), **table, verdicts=tuple(verdicts))

    return draw


def _table(cells: Cells, axes: tuple[str, ...], levels: Mapping[str, Any], split: str = "") -> dict[str, Any]:
    splits = (split,) if split else ("compositional", "iid")
    models = list(dict.fromkeys(model for cell in cells.values() for model in cell))
    head = ("setting", *(f"{label(m)}, {name}" for name in splits for m in models))
    rows, found = [], {}
    for place, by in sorted(cells.items()):
        name = ", ".join(f"{axis} {value:g}" for axis, value in zip(axes, place, strict=True))
        rows.append((name, *(str(_value(by[m], s)) if m in by else "–" for s in splits for m in models)))
        found[name] = {m: {s: numbers(_value(cell, s)) for s in splits} for m, cell in by.items()}
    notes = [f"{name.replace('_', ' ')}: {level}" for name, level in levels.items()]
    settings = sorted({setting_text(cell) for by in cells.values() for cell in by.values()})
    return {"head": head, "rows": tuple(rows), "numbers": found, "notes": (*notes, f"Settings: {'; '.join(settings)}.")}
