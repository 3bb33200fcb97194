"""Common parts of the dual-attention figures: runs, claims about learning, tables and learning curves.

All models of a study have as many parameters as dual attention, within 1 %, and the same number of optimiser steps.
Parameters are matched by the width of the feed-forward layers; for CoRelNet by the width of its first MLP, for PrediNet
by the number of relations.  Only `split` varies the number of heads.

At small scale: gradients clipped at 1, warm-up and a cosine to a tenth of the rate, the same rate for all models, and
dropout only on images.

A claim about learning curves compares their means over the sizes of the training set, seed by seed.  The papers print
the games' numbers without standard errors, so those cannot be tested.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyhead.analysis import figures
from polyhead.config import Classes, Input, Model, Patches, Run, Task
from polyhead.papers.claims import Estimate, Scores, Verdict, above, mean
from polyhead.papers.dual.models import ROWS, Relations, classifier, label, writer
from polyhead.papers.outcome import (
    SEED_CAPTION,
    Cells,
    FigureOutcome,
    Panel,
    Picture,
    baseline_curves,
    cells_by_model,
    is_complete_grid,
    labelled_baselines,
    score_curves,
    scores_by_model,
    settings_note,
)
from polyhead.papers.sizes import Scale, Setting, training
from polyhead.papers.study import Cell, Coordinates, Study
from polyhead.tasks import Images, Maths, ObjectSorting, PairwiseOrder, RelationalGames, SetCards

Printed = Callable[[Coordinates, str], str]
"""The paper's numbers for a place and a model."""

Columns = Sequence[tuple[str, str, str | None]]
"""Title, split and metric (None: the task's own) of a column."""

Curve = Mapping[int, Scores]
"""Size of the training set -> model (a name of `models.ROWS`) -> score."""

RELATIVE = ("softmax-rope", "softmax-t5")
"""Our controls."""

GAME_SPLITS = ("validation", "iid", "novel_hexominoes", "novel_stripes")
ASYMMETRIC = Relations(symmetric=False)
EARLIER = ("disentangled", "rca")
"""The operators that came before relational heads, each mixed with softmax heads."""
COMPARED = ("dual", "relational", *EARLIER, "softmax", *RELATIVE, "corelnet", "predinet", "abstractor")
WRITERS = ("dual", "softmax", "softmax-rope", "abstractor")


# ----------------------------------------------------------------------------------------------------------------- runs
def run_of(name: str, task: Task, model: Model, shape: Scale, setting: Setting) -> Run:
    """A run whose `name` ends with the seed; scored on all splits except train, games on each set of unseen shapes."""
    splits = GAME_SPLITS if isinstance(task, RelationalGames) else tuple(s for s in task.splits if s != "train")
    train = training(shape, setting, splits)
    return Run(name=name, task=task, model=model, train=train, seed=int(name.rpartition("-")[2]), threads=1)


def classified(
    name: str,
    tasks: Sequence[Images | PairwiseOrder | SetCards],
    rows: tuple[str, ...],
    shape: Scale,
    relations: Relations,
) -> tuple[Run, ...]:
    runs = []
    for task, row, setting in itertools.product(tasks, rows, shape.grid()):
        model = classifier(ends_of(task), task.length, row, replace(shape, steps=0), relations)
        what = task.data if isinstance(task, Images) else name
        runs.append(run_of(f"{what}-{row}-{task.split_seed}", task, model, shape, setting))
    return tuple(runs)


def ends_of(task: RelationalGames | Images | PairwiseOrder | SetCards) -> tuple[Input, Classes]:
    """Inputs and outputs.  Patches are normalised around the projection as in the papers; digits are too small."""
    inputs, outputs = task.ends
    if not isinstance(inputs, Patches) or (isinstance(task, Images) and task.data == "digits"):
        return inputs, outputs
    return replace(inputs, norm=True), outputs


def written(
    task: ObjectSorting | Maths, source: tuple[Input, int], row: str, shape: Scale, relations: Relations
) -> Model:
    return writer(source, (*task.ends, task.length), row, replace(shape, steps=0), relations)


def single(name: str, runs: tuple[Run, ...], like: str) -> Run:
    """The run called `like` as a separate recipe."""
    (found,) = (run for run in runs if run.name == like)
    return replace(found, name=name, threads=None)


# --------------------------------------------------------------------------------------------------------------- claims
def learns(what: str, curve: Curve) -> list[Verdict]:
    """Claims that dual attention learns from fewer examples than softmax heads, with learned positions (as in the
    paper) and with relative positions.  Claims whose models were not run are omitted."""
    sizes = " and ".join(map(str, curve))
    verdicts = []
    for others, words in ((("softmax",), ""), (RELATIVE, " that know relative positions")):
        found = [other for other in others if all({"dual", other} <= set(scores) for scores in curve.values())]
        parts = {f"over {ROWS[other].label}, mean of n {sizes}": gap(curve, "dual", other) for other in found}
        if parts:
            claim = f"dual attention learns {what} from fewer examples than softmax heads{words}"
            verdicts.append(above(claim, parts))
    return verdicts


def better(what: str, one: str, others: Sequence[str], scores: Mapping[str, Scores]) -> list[Verdict]:
    """The claim that `one` is better than each of `others`, by the mean of `scores[place]` over places with both.

    The claim names those of `others` that were run, with a part for each; no claim if none was.
    """
    parts, named = {}, []
    for other in others:
        those = {place: by for place, by in scores.items() if {one, other} <= set(by)}
        if those:
            named.append(ROWS[other].label)
            of = f", mean of {', '.join(those)}" if len(scores) > 1 else ""
            parts[f"over {named[-1]}{of}"] = mean([by[one] - by[other] for by in those.values()])
    claim = f"{ROWS[one].label} is better than {' and '.join(named)} at {what}"
    return [above(claim, parts)] if parts else []


def operators(what: str, scores: Mapping[str, Scores]) -> list[Verdict]:
    """Claims about operators: dual attention against earlier operators, each mixed with softmax heads; and the
    draft's own operator (disentangled) against softmax heads alone, with and without relative positions."""
    found = better(what, "dual", EARLIER, scores)
    return found + better(what, "disentangled", ("softmax", *RELATIVE), scores)


def gap(curve: Curve, one: str, other: str) -> Estimate:
    """The difference of `one` and `other`, averaged over the sizes."""
    return mean([scores[one] - scores[other] for scores in curve.values()])


# -------------------------------------------------------------------------------------------------------------- drawing
def course(
    axis: str, columns: Columns, claim: Callable[[Cells], list[Verdict]], printed: Printed
) -> Callable[[Study], FigureOutcome]:
    """Draws the validation score by optimiser step, a panel per value of `axis`, and the table."""

    def draw(study: Study) -> FigureOutcome:
        cells = cells_by_model(study, axis)
        panels: list[Panel] = []
        for (value,), by in cells.items():
            name = str(value).partition("__")[2] or str(value)
            courses = {label(m): cell.course("validation") for m, cell in by.items()}
            panels.append((name.replace("_", " "), courses, means(by, "validation")))
        metric = study.points[0].run.task.metric.replace("_", " ")
        figure = figures.lines(panels, x_label="optimiser steps", y_label=metric, limits=(0.0, 1.02))
        caption = f"{metric.capitalize()} on validation data in the course of training; {SEED_CAPTION}."
        verdicts = claim(cells) if is_complete_grid(cells) else []
        found = table(cells, (axis,), tuple(one for one in columns if scored_on(cells, one[1])), printed)
        return replace(found, pictures=(Picture(study.figure, caption, figure),), verdicts=tuple(verdicts))

    return draw


def scored_on(cells: Cells, split: str) -> bool:
    """Whether all runs have scores on `split`; published data lack some."""
    return all(split in point.result.scores for by in cells.values() for cell in by.values() for point in cell.points)


def by_examples(cells: Cells, split: str, x_label: str, chance: float) -> Any:
    """A panel per value of the first axis, with the second axis, the number of examples, on x."""
    panels: list[Panel] = []
    for name in dict.fromkeys(place[0] for place in cells):
        mine = {n: by for (which, n), by in cells.items() if which == name}
        points = {n: scores_by_model(by, split) for n, by in mine.items()}
        levels: dict[str, Any] = {"chance": chance} if chance else {}
        levels |= baseline_curves(mine, split)
        panels.append((str(name).replace("_", " "), score_curves(points, label), levels))
    low = chance - 0.1 if chance else 0.0
    return figures.lines(panels, x_label=x_label, y_label="accuracy", log_x=True, limits=(low, 1.02))


def means(by: Mapping[Any, Cell], split: str) -> dict[str, float]:
    """The means of the floors of these cells."""
    return {name: level.mean for name, level in labelled_baselines(by, split).items()}


def table(cells: Cells, axes: tuple[str, ...], columns: Columns, printed: Printed | None = None) -> FigureOutcome:
    """A table with a row per place and model; below the models of a place, a row per floor."""
    head = (*axes, "model", *(name for name, _, _ in columns), *(["paper"] if printed else []), "parameters", "steps")
    rows, found = [], {}
    for place, by in cells.items():
        where = [str(value).replace("__", ": ").replace("_", " ") for value in place]
        mine = {}
        for model, cell in by.items():
            values = {name: cell.score(split, metric) for name, split, metric in columns}
            own = [printed(place, model)] if printed else []
            rows.append((*where, label(model), *map(str, values.values()), *own, *size(cell)))
            mine[model] = {name: value.as_json() for name, value in values.items()}
        levels = {name: labelled_baselines(by, split) for name, split, metric in columns if metric is None}
        for floor in dict.fromkeys(floor for by_floor in levels.values() for floor in by_floor):
            values = {name: by_floor[floor] for name, by_floor in levels.items() if floor in by_floor}
            texts = [str(values.get(name, "–")) for name, _, _ in columns]
            rows.append((*where, floor, *texts, *["–"] * (len(head) - len(where) - 1 - len(texts))))
            mine[floor] = {name: value.as_json() for name, value in values.items()}
        found[", ".join(map(str, place))] = mine
    return FigureOutcome(head=head, rows=tuple(rows), numbers=found, notes=notes(cells))


def size(cell: Cell) -> tuple[str, str]:
    """Parameters and optimiser steps of a cell."""
    counts = {point.result.parameters for point in cell.points}
    steps = {point.run.train.steps for point in cell.points}
    return " / ".join(f"{n:,}" for n in sorted(counts)), " / ".join(f"{n:,}" for n in sorted(steps))


def notes(cells: Cells) -> tuple[str, ...]:
    """The settings, and our choices where the papers are silent."""
    ran = {model for by in cells.values() for model in by}
    return (
        *(f"{row.label}: {row.choice}." for name, row in ROWS.items() if row.choice and name in ran),
        settings_note(cell for by in cells.values() for cell in by.values()),
    )


def percent(values: Mapping[str, tuple[float, float]], model: str) -> str:
    if model not in values:
        return "–"
    value, error = values[model]
    return f"{value / 100:.3f}" + ("" if math.isnan(error) else f" ± {error / 100:.3f}")
