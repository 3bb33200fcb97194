"""The finished runs of a figure as a table: the figure's axes, the searched settings, and the selected one.

A cell of a figure is one model at one point of the axes.  The reported setting (learning rate, weight decay, warm-up)
has the best mean validation score over seeds.  The reported splits never influence this choice.
"""

import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from polyhead.analysis.claims import Estimate, over_networks
from polyhead.config import Run, TransformerConfig, total_heads
from polyhead.papers.sizes import Setting
from polyhead.scale.sweep import Failure
from polyhead.spec.optional import optional
from polyhead.tasks.record import RECORD
from polyhead.train import Result
from polyhead.train.stop import DIVERGED
from polyhead.train.store.folder import RESULT, read_metrics

if TYPE_CHECKING:
    from pandas import Series

# An axis of figures: the value of a run, None where it has none.
Axis = Callable[[Run], Any]


def _heads(run: Run) -> int | None:
    if not isinstance(run.model, TransformerConfig):
        return None
    return total_heads(run.model.layer_heads(0))


# The axes that figures of any paper may use.
AXES: dict[str, Axis] = {
    "task": lambda run: run.task.name,
    "lr": lambda run: run.train.lr,
    "length": lambda run: run.task.length,
    "instances": lambda run: run.train.steps * run.train.batch_size,
    "width": lambda run: getattr(run.model, "dim", None),
    "depth": lambda run: getattr(run.model, "layers", None),
    "heads": _heads,
}

# A value for `split` that stands for the training loss.
TRAINING_LOSS = "training loss"
# How many of the last logged training losses are averaged.
LAST_LOSSES = 5


@dataclass(frozen=True)
class ModelRow:
    """A model of a study: its label in figures, and our choice where the papers are silent."""

    label: str
    choice: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Paper:
    """A paper, or a family of papers, whose figures are reproduced.

    Attributes:
        models: By the name with which the name of a run ends, before its seed.
        axes: The axes of its figures in addition to `AXES`.
    """

    title: str
    models: Mapping[str, ModelRow]
    axes: Mapping[str, Axis] = field(default_factory=dict)

    def row_of(self, run: Run) -> str:
        """The name of the model that a run trains.  Raises ValueError for a name of no model."""
        name = run.name.removesuffix(f"-{run.seed}")
        rows = [row for row in self.models if f"-{name}".endswith(f"-{row}")]
        if not rows:
            raise ValueError(f"row_of: the name of {run.name} ends with none of the models of {self.title}")
        return max(rows, key=len)  # "hyla-linear" ends with "linear", too

    def label(self, row: str) -> str:
        """The label of a model in figures."""
        return self.models[row].label

    def coordinates(self, run: Run) -> dict[str, Any]:
        """The value of a run on each axis that it has."""
        values = {}
        for name, axis in {"model": self.row_of, **AXES, **self.axes}.items():
            value = axis(run)
            if value is not None:
                values[name] = value
        return values


@dataclass(frozen=True)
class FinishedRun:
    """One finished run.

    Attributes:
        courses: Where the run's folder is gone, the scores of its main metric during training, by split and optimiser
            step, and its `TRAINING_LOSS` at the last step; None if they are in the folder.
        text: Where the folder is gone, the fingerprint of the text on which the run trained.
    """

    run: Run
    result: Result
    courses: Mapping[str, Mapping[int, float]] | None = None
    text: str | None = None

    def score(self, split: str, metric: str | None = None) -> float:
        name = metric or self.run.task.metric
        if name not in self.result.scores.get(split, {}):
            raise ValueError(
                f"{self.result.folder / RESULT}: no {name} on {split}, so it is not of this version; delete it"
            )
        return float(self.result.scores[split][name])

    def sampling(self, split: str, metric: str | None = None) -> float:
        """The standard error of `score` over the test sequences; 0 if unknown."""
        return float(self.result.scores[split].get(f"{metric or self.run.task.metric}_se", 0.0))

    def course(self, split: str, metric: str | None = None) -> dict[int, float]:
        """The scores on `split` during training, by optimiser step; for `TRAINING_LOSS` the last one."""
        name = metric or self.run.task.metric
        courses = self.courses
        if courses is None:
            courses = self.read_courses(name)
        elif name != self.run.task.metric:
            courses = {}
        if split not in courses:
            score = split if split == TRAINING_LOSS else f"{name} on {split}"
            raise ValueError(f"{self.result.folder}: no {score} during training is kept; train this run again")
        return dict(courses[split])

    def read_courses(self, metric: str) -> dict[str, dict[int, float]]:
        """The scores in the run's folder by split and step, and the mean of the last training losses."""
        courses: dict[str, dict[int, float]] = {}
        losses = []
        for row in read_metrics(self.result.folder):
            if row["kind"] == "train":
                losses.append(row["loss"])
            elif row["kind"] == "eval" and metric in row:
                courses.setdefault(row["split"], {})[row["step"]] = float(row[metric])
        last = losses[-LAST_LOSSES:]
        if not last:
            return courses
        return {TRAINING_LOSS: {self.result.steps: float(sum(last) / len(last))}, **courses}

    def fingerprint(self) -> str | None:
        """The fingerprint of its text or files; None if its data are generated, or where it was not kept."""
        try:
            return self.text or str(json.loads((self.result.folder / RECORD).read_bytes())["fingerprint"])
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None


def setting_of(run: Run) -> Setting:
    return Setting(run.train.lr, run.train.weight_decay, run.train.warmup)


@dataclass(frozen=True)
class Cell:
    """The runs of the selected setting, one per seed, and the number of searched settings.

    Attributes:
        diverged: Seeds of this setting that diverged.  Their scores are NaN, so no claim is judged by the other seeds.
    """

    setting: Setting
    points: tuple[FinishedRun, ...]
    tried: int
    validation: Estimate
    diverged: tuple[int, ...] = ()

    def score(self, split: str, metric: str | None = None) -> Estimate:
        """The score over seeds, with the error from finite test sets: that of one set does not fall with more seeds.

        For the split `TRAINING_LOSS`: the training loss.
        """
        if split == TRAINING_LOSS:
            losses = {}
            for point in self.points:
                course = point.course(TRAINING_LOSS)
                losses[point.run.seed] = course[max(course)]
            return Estimate.of(losses)
        errors = []
        values = dict.fromkeys(self.diverged, math.nan)
        tasks = set()
        for point in self.points:
            errors.append(point.sampling(split, metric))
            values[point.run.seed] = point.score(split, metric)
            tasks.add(point.run.task)
        return over_networks(values, errors, tasks, split)

    def course(self, split: str, metric: str | None = None) -> dict[int, list[float]]:
        """The scores of its seeds, by optimiser step."""
        course: dict[int, list[float]] = {}
        for point in self.points:
            for step, score in point.course(split, metric).items():
                course.setdefault(step, []).append(score)
        return course


@dataclass(frozen=True)
class Study:
    """The finished and the failed runs of a figure; `diverged`: those of the failed ones that diverged."""

    figure: str
    paper: Paper
    scale: str
    folder: pathlib.Path
    points: tuple[FinishedRun, ...]
    failures: tuple[Failure, ...] = ()
    diverged: tuple[Run, ...] = ()

    @classmethod
    def of(
        cls,
        figure: str,
        paper: Paper,
        scale: str,
        folder: pathlib.Path,
        runs: Sequence[Run],
        outcomes: Sequence[Result | Failure],
    ) -> "Study":
        """The study from a sweep's outcomes, in the order of `runs`."""
        points = []
        failures = []
        diverged = []
        for run, outcome in zip(runs, outcomes, strict=True):
            if isinstance(outcome, Result):
                points.append(FinishedRun(run, outcome))
                continue
            failures.append(outcome)
            if outcome.error.endswith(DIVERGED):
                diverged.append(run)
        return cls(figure, paper, scale, folder, tuple(points), tuple(failures), tuple(diverged))

    def split_name(self, split: str) -> str:
        """The name of a split, from the task of the first run."""
        return self.points[0].run.task.split_name(split)

    def searched(self, *axes: str, task: str | None = None) -> dict[tuple[Any, ...], dict[Setting, list[FinishedRun]]]:
        """Return the runs by coordinates on `axes` and by setting, in the order of the runs; `task`: only of this."""
        runs: dict[tuple[Any, ...], dict[Setting, list[FinishedRun]]] = {}
        for point in self.points:
            coordinates = self.paper.coordinates(point.run)
            if task in (None, coordinates["task"]):
                condition = tuple(map(coordinates.get, axes))
                runs.setdefault(condition, {}).setdefault(setting_of(point.run), []).append(point)
        return runs

    def cells(self, *axes: str, task: str | None = None) -> "Series":
        """Return the selected cells: a series with a level of its index for each axis, in the order of the runs.

        `study.cells("length", "model")[32, "hyla"]` is the cell of HYLA at length 32, of all tasks or of `task` alone.
        """
        with optional("reproduce", "polyhead[report]"):
            import pandas
        runs = self.searched(*axes, task=task)
        diverged: dict[tuple[Any, ...], list[int]] = {}
        for run in self.diverged:
            coordinates = self.paper.coordinates(run)
            if task in (None, coordinates["task"]):
                condition = tuple(map(coordinates.get, axes))
                diverged.setdefault((*condition, setting_of(run)), []).append(run.seed)
        cells = []
        for condition, by_setting in runs.items():
            cell = select(by_setting)
            # A setting whose seeds all diverged was searched, too.
            settings = {*by_setting, *(key[-1] for key in diverged if key[:-1] == condition)}
            seeds = tuple(diverged.get((*condition, cell.setting), ()))
            cells.append(replace(cell, tried=len(settings), diverged=seeds))
        index = pandas.MultiIndex.from_tuples(runs, names=axes)
        if len(axes) == 1:
            index = index.get_level_values(0)
        return pandas.Series(cells, index=index, dtype=object)


def select(by_setting: Mapping[Setting, Sequence[FinishedRun]]) -> Cell:
    """Return the setting with the best mean validation score, among settings with the most finished seeds."""
    num_seeds = max(map(len, by_setting.values()))
    estimates: dict[Setting, Estimate] = {}
    ranks: dict[Setting, float] = {}
    for setting, points in by_setting.items():
        # Runs of this setting failed: its mean would be over fewer seeds.
        if len(points) < num_seeds:
            continue
        estimates[setting] = over_seeds(points, "validation")
        ranks[setting] = points[0].run.task.gain(estimates[setting].mean)
        # A diverged run is never the best.
        if math.isnan(ranks[setting]):
            ranks[setting] = -math.inf
    best = max(ranks, key=ranks.__getitem__)
    return Cell(best, tuple(by_setting[best]), len(by_setting), estimates[best])


def over_seeds(points: Sequence[FinishedRun], split: str) -> Estimate:
    """The score of runs that differ only in their seeds."""
    return Estimate.of({point.run.seed: point.score(split) for point in points})
