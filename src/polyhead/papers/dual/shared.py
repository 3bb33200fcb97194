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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    settings_of,
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
    """Return the runs of every task, model and setting that classify."""
    runs = []
    for task, row, setting in itertools.product(tasks, rows, shape.grid()):
        model = classifier(ends_of(task), task.length, row, replace(shape, steps=0), relations)
        prefix = task.data if isinstance(task, Images) else name
        runs.append(run_of(f"{prefix}-{row}-{task.split_seed}", task, model, shape, setting))
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
def learns(subject: str, curve: Curve) -> list[Verdict]:
    """Return claims that dual attention learns from fewer examples than softmax heads.

    With learned positions, as in the paper, and with relative positions.  Claims whose models were not run are omitted.
    """
    sizes = " and ".join(map(str, curve))
    verdicts = []
    for others, words in ((("softmax",), ""), (RELATIVE, " that know relative positions")):
        parts = {}
        for other in others:
            if has_models(curve.values(), "dual", other):
                parts[f"over {ROWS[other].label}, mean of n {sizes}"] = gap(curve, "dual", other)
        if parts:
            claim = f"dual attention learns {subject} from fewer examples than softmax heads{words}"
            verdicts.append(above(claim, parts))
    return verdicts


def has_models(scores: Iterable[Scores], *models: str) -> bool:
    """Return whether every place has a score of each of these models."""
    return all(set(models) <= set(by_model) for by_model in scores)


def better(subject: str, one: str, others: Sequence[str], scores: Mapping[str, Scores]) -> list[Verdict]:
    """Return the claim that `one` is better than each of `others`, by the mean over places with both.

    `scores[place]`: scores by model.  The claim names those of `others` that were run, with a part for each; no claim
    if none was.
    """
    parts = {}
    labels = []
    for other in others:
        differences = {}
        for condition, by_model in scores.items():
            if {one, other} <= set(by_model):
                differences[condition] = by_model[one] - by_model[other]
        if differences:
            labels.append(ROWS[other].label)
            places = f", mean of {', '.join(differences)}" if len(scores) > 1 else ""
            parts[f"over {labels[-1]}{places}"] = mean(list(differences.values()))
    if not parts:
        return []
    return [above(f"{ROWS[one].label} is better than {' and '.join(labels)} at {subject}", parts)]


def operators(subject: str, scores: Mapping[str, Scores]) -> list[Verdict]:
    """Return claims about operators.

    Dual attention against earlier operators, each mixed with softmax heads; and the draft's own operator (disentangled)
    against softmax heads alone, with and without relative positions.
    """
    verdicts = better(subject, "dual", EARLIER, scores)
    return verdicts + better(subject, "disentangled", ("softmax", *RELATIVE), scores)


def gap(curve: Curve, one: str, other: str) -> Estimate:
    """Return the difference of `one` and `other`, averaged over the sizes."""
    return mean([scores[one] - scores[other] for scores in curve.values()])


# -------------------------------------------------------------------------------------------------------------- drawing
def course(
    axis: str, columns: Columns, claim: Callable[[Cells], list[Verdict]], printed: Printed
) -> Callable[[Study], FigureOutcome]:
    """Draw the validation score by optimiser step, a panel per value of `axis`, and the table."""

    def draw(study: Study) -> FigureOutcome:
        cells = cells_by_model(study, axis)
        panels: list[Panel] = []
        for (value,), by_model in cells.items():
            name = str(value).partition("__")[2] or str(value)
            curves = {label(model): cell.course("validation") for model, cell in by_model.items()}
            panels.append((name.replace("_", " "), curves, means(by_model, "validation")))
        metric = study.points[0].run.task.metric.replace("_", " ")
        figure = figures.lines(panels, x_label="optimiser steps", y_label=metric, limits=(0.0, 1.02))
        caption = f"{metric.capitalize()} on validation data in the course of training; {SEED_CAPTION}."
        verdicts = claim(cells) if is_complete_grid(cells) else []
        outcome = table(cells, (axis,), [column for column in columns if scored_on(cells, column[1])], printed)
        return replace(outcome, pictures=(Picture(study.figure, caption, figure),), verdicts=tuple(verdicts))

    return draw


def scored_on(cells: Cells, split: str) -> bool:
    """Return whether all runs have scores on `split`; published data lack some."""
    for by_model in cells.values():
        for cell in by_model.values():
            if not all(split in point.result.scores for point in cell.points):
                return False
    return True


def by_examples(cells: Cells, split: str, x_label: str, chance: float) -> Any:
    """Draw a panel per value of the first axis, with the second axis, the number of examples, on x."""
    panels: list[Panel] = []
    for name in dict.fromkeys(condition[0] for condition in cells):
        cells_by_size = {condition[1]: by_model for condition, by_model in cells.items() if condition[0] == name}
        points = {size: scores_by_model(by_model, split) for size, by_model in cells_by_size.items()}
        levels: dict[str, Any] = {"chance": chance} if chance else {}
        levels |= baseline_curves(cells_by_size, split)
        panels.append((str(name).replace("_", " "), score_curves(points, label), levels))
    lowest = chance - 0.1 if chance else 0.0
    return figures.lines(panels, x_label=x_label, y_label="accuracy", log_x=True, limits=(lowest, 1.02))


def means(by_model: Mapping[Any, Cell], split: str) -> dict[str, float]:
    """Return the means of the baselines of these cells."""
    return {name: level.mean for name, level in labelled_baselines(by_model, split).items()}


def table(cells: Cells, axes: tuple[str, ...], columns: Columns, printed: Printed | None = None) -> FigureOutcome:
    """Return a table with a row per place and model; below the models of a place, a row per baseline."""
    names = [name for name, _, _ in columns]
    head = (*axes, "model", *names, *(["paper"] if printed else []), "parameters", "steps")
    rows: list[tuple[str, ...]] = []
    numbers: dict[str, dict[str, dict[str, Any]]] = {}
    for condition, by_model in cells.items():
        where = [str(value).replace("__", ": ").replace("_", " ") for value in condition]
        place_numbers = numbers.setdefault(", ".join(map(str, condition)), {})
        for model, cell in by_model.items():
            scores = {name: cell.score(split, metric) for name, split, metric in columns}
            paper = [printed(condition, model)] if printed else []
            rows.append((*where, label(model), *map(str, scores.values()), *paper, *size(cell)))
            place_numbers[model] = {name: score.as_json() for name, score in scores.items()}
        # Baselines are scored by the task's own metric only.
        estimates: dict[str, dict[str, Estimate]] = {}
        for name, split, metric in columns:
            if metric is None:
                for baseline, estimate in labelled_baselines(by_model, split).items():
                    estimates.setdefault(baseline, {})[name] = estimate
        for baseline, by_column in estimates.items():
            texts = [str(by_column.get(name, "–")) for name in names]
            rest = ["–"] * (len(head) - len(where) - 1 - len(texts))
            rows.append((*where, baseline, *texts, *rest))
            place_numbers[baseline] = {name: estimate.as_json() for name, estimate in by_column.items()}
    return FigureOutcome(head=head, rows=tuple(rows), numbers=numbers, notes=notes(cells))


def size(cell: Cell) -> tuple[str, str]:
    """Parameters and optimiser steps of a cell."""
    counts = {point.result.parameters for point in cell.points}
    steps = {point.run.train.steps for point in cell.points}
    return " / ".join(f"{n:,}" for n in sorted(counts)), " / ".join(f"{n:,}" for n in sorted(steps))


def notes(cells: Cells) -> tuple[str, ...]:
    """Return the settings, and our choices where the papers are silent."""
    models: set[str] = set()
    for by_model in cells.values():
        models |= set(by_model)
    lines = []
    for name, row in ROWS.items():
        if row.choice and name in models:
            lines.append(f"{row.label}: {row.choice}.")
    return (*lines, settings_of(cells))


def percent(values: Mapping[str, tuple[float, float]], model: str) -> str:
    if model not in values:
        return "–"
    value, error = values[model]
    return f"{value / 100:.3f}" + ("" if math.isnan(error) else f" ± {error / 100:.3f}")
