"""Common parts of the dual-attention figures: runs, claims about learning, tables and learning curves.

All models of a study have as many parameters as dual attention, within 1 %, and the same number of optimiser steps.
Parameters are matched by the width of the feed-forward layers; for CoRelNet by the width of its first MLP, for PrediNet
by the number of relations.

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
from polyhead.analysis.claims import Verdict, above, mean
from polyhead.config import Model, Patches, Run
from polyhead.papers import outcome
from polyhead.papers.dual.models import ROWS, Relations, classifier, label, writer
from polyhead.papers.outcome import Cells, Column, FigureOutcome, Picture, Rows, Table
from polyhead.papers.sizes import Scale, training
from polyhead.papers.study import Cell, Study
from polyhead.tasks import Maths, ObjectSorting, RelationalGames
from polyhead.tasks.base import Task

# The paper's numbers for a condition and a model.
Printed = Callable[[tuple[Any, ...], str], str]
# A task, the size of its models, and what the names of its runs begin and end with: its name and seed.
RunPlan = tuple[Task, Scale, str, int]

# Our controls.
RELATIVE = ("softmax-rope", "softmax-t5")

GAME_SPLITS = ("validation", "iid", "novel_hexominoes", "novel_stripes")
ASYMMETRIC = Relations(symmetric=False)
# The operators that came before relational heads, each mixed with softmax heads.
EARLIER = ("disentangled", "rca")
COMPARED = ("dual", "relational", *EARLIER, "softmax", *RELATIVE, "corelnet", "predinet", "abstractor")
WRITERS = ("dual", "softmax", "softmax-rope", "abstractor")


# ---------------------------------------------------------------------------------------------------------------- runs
def compared(plans: Iterable[RunPlan], rows: Iterable[str], relations: Relations) -> tuple[Run, ...]:
    """Return the runs of every point, model and setting, scored on all splits except train; games on `GAME_SPLITS`."""
    runs = []
    for (task, shape, name, seed), row in itertools.product(plans, rows):
        model = model_of(task, row, shape, relations)
        splits = tuple(split for split in task.splits if split != "train")
        if isinstance(task, RelationalGames):
            splits = GAME_SPLITS
        for setting in shape.grid():
            train = training(shape, setting, splits)
            runs.append(Run(name=f"{name}-{row}-{seed}", task=task, model=model, train=train, seed=seed, threads=1))
    return tuple(runs)


def model_of(task: Task, row: str, shape: Scale, relations: Relations) -> Model:
    """Return the model `row` of a task."""
    shape = replace(shape, steps=0)  # sizes do not depend on it
    inputs, outputs = task.ends
    if isinstance(task, Maths | ObjectSorting):
        return writer((task.source, task.source_length), (inputs, outputs, task.length), row, shape, relations)
    # Patches are normalised around the projection as in the papers; digits are too small for it.
    if isinstance(inputs, Patches) and getattr(task, "data", "") != "digits":
        inputs = replace(inputs, norm=True)
    return classifier((inputs, outputs, task.length), row, shape, relations)


def single(name: str, runs: tuple[Run, ...], like: str) -> Run:
    """The run called `like` as a separate recipe."""
    (run,) = (run for run in runs if run.name == like)
    return replace(run, name=name, threads=None)


# -------------------------------------------------------------------------------------------------------------- claims
def learns(subject: str, scores: Table) -> list[Verdict]:
    """Return claims that dual attention learns from fewer examples than softmax heads.

    With learned positions, as in the paper, and with relative positions.  Claims whose models were not run are omitted.

    Args:
        scores: A row for each size of the training set.
    """
    sizes = " and ".join(map(str, scores.index))
    verdicts = []
    for others, words in ((("softmax",), ""), (RELATIVE, " that know relative positions")):
        parts = {}
        for other in others:
            lead = outcome.differences(scores, "dual", other)
            if len(lead) == len(scores):
                parts[f"over {label(other)}, mean of n {sizes}"] = mean(lead)
        if parts:
            claim = f"dual attention learns {subject} from fewer examples than softmax heads{words}"
            verdicts.append(above(claim, parts))
    return verdicts


def better(subject: str, first: str, others: Sequence[str], scores: Table) -> list[Verdict]:
    """Return the claim that `first` is better than each of `others`, by the mean over conditions with both.

    The claim names those of `others` that were run, with a part for each; no claim if none was.
    """
    parts = {}
    labels = []
    for other in others:
        lead = outcome.differences(scores, first, other)
        if len(lead):
            labels.append(label(other))
            name = f"over {label(other)}"
            if len(scores) > 1:
                name += f", mean of {', '.join(lead.index)}"
            parts[name] = mean(lead)
    if not parts:
        return []
    return [above(f"{label(first)} is better than {' and '.join(labels)} at {subject}", parts)]


def operators(subject: str, scores: Table) -> list[Verdict]:
    """Return claims about operators.

    Dual attention against earlier operators, each mixed with softmax heads; and the draft's own operator (disentangled)
    against softmax heads alone, with and without relative positions.
    """
    verdicts = better(subject, "dual", EARLIER, scores)
    return verdicts + better(subject, "disentangled", ("softmax", *RELATIVE), scores)


# ------------------------------------------------------------------------------------------------------------- drawing
def course(
    study: Study, axis: str, columns: Sequence[Column], claim: Callable[[Cells], list[Verdict]], printed: Printed
) -> FigureOutcome:
    """Draw the validation score by optimiser step, a panel per value of `axis`, and the table."""
    cells = study.cells(axis, "model")
    panels: list[outcome.Panel] = []
    for value, in_panel in cells.groupby(level=axis, sort=False):
        courses = {label(model): cell.course("validation") for (_, model), cell in in_panel.items()}
        baselines = outcome.baseline_means(outcome.runs_of(in_panel), "validation")
        panels.append((short_name(value), courses, baselines))
    metric = study.points[0].run.task.metric.replace("_", " ")
    figure = figures.lines(panels, x_label="optimiser steps", y_label=metric, limits=(0.0, 1.02))
    caption = f"{metric.capitalize()} on validation data in the course of training; {outcome.SEED_CAPTION}."
    rows, numbers = table(cells, columns, printed)
    verdicts = []
    if outcome.is_complete_grid(cells):
        verdicts = claim(cells)
    return FigureOutcome([Picture(study.figure, caption, figure)], rows, verdicts, notes(cells), numbers)


def short_name(value: Any) -> str:
    """Return the name of a game, module or data set without the module's area, as words."""
    return str(value).rpartition("__")[2].replace("_", " ")


def by_examples(cells: Cells, split: str, x_label: str, chance: float) -> Any:
    """Draw a panel per value of the first axis, with the second axis, the number of examples, on x."""

    of_chance: dict[str, Any] = {}
    lowest = 0.0
    if chance:
        of_chance["chance"] = chance
        lowest = chance - 0.1

    def levels(in_panel: Cells) -> dict[str, Any]:
        return of_chance | outcome.baseline_curves(in_panel, split)

    panels = outcome.panels(cells, split, label, short_name, levels)
    return figures.lines(panels, x_label=x_label, y_label="accuracy", log_x=True, limits=(lowest, 1.02))


def table(cells: Cells, columns: Sequence[Column], printed: Printed | None = None) -> Rows:
    """Return a row per condition and model, and a row per baseline below them."""
    axes = list(cells.index.names[:-1])
    rows = []
    numbers: dict[str, dict[str, Any]] = {}
    for condition, of_condition in cells.groupby(level=axes, sort=False):
        named = {}
        for axis, value in zip(axes, condition, strict=True):
            named[axis] = str(value).replace("__", ": ").replace("_", " ")
        values = numbers.setdefault(", ".join(map(str, condition)), {})
        for model, cell in of_condition.droplevel(axes).items():
            texts, values[model] = outcome.score_row(cell, columns)
            if printed is not None:
                texts["paper"] = printed(condition, model)
            rows.append({**named, "model": label(model), **texts, **size(cell)})
        # Baselines are scored by the task's own metric only.
        of_baselines: dict[str, dict[str, str]] = {}
        for title, split, metric in columns:
            if metric is None:
                for name, estimate in outcome.drawn_baselines(outcome.runs_of(of_condition), split).items():
                    of_baselines.setdefault(name, {**named, "model": name})[title] = str(estimate)
                    values.setdefault(name, {})[title] = estimate.as_json()
        rows += of_baselines.values()
    return rows, numbers


def size(cell: Cell) -> dict[str, str]:
    """Parameters and optimiser steps of a cell, the smallest first."""
    counts: dict[str, set[int]] = {"parameters": set(), "steps": set()}
    for point in cell.points:
        counts["parameters"].add(point.result.parameters)
        counts["steps"].add(point.run.train.steps)
    return {name: " / ".join(map("{:,}".format, sorted(values))) for name, values in counts.items()}


def notes(cells: Cells) -> list[str]:
    """Return our choices where the papers are silent, and the settings."""
    return [*outcome.choices(ROWS, cells.index.unique("model")), outcome.settings_note(cells)]


def percent(values: Mapping[str, tuple[float, float]], model: str) -> str:
    """Return a percentage and its standard error as fractions."""
    if model not in values:
        return "–"
    value, error = values[model]
    if math.isnan(error):
        return f"{value / 100:.3f}"
    return f"{value / 100:.3f} ± {error / 100:.3f}"
