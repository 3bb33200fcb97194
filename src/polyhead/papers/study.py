"""The finished runs of a figure as a table: the figure's axes, the searched settings, and the selected one.

A cell of a figure is one model at one point of the axes.  The reported setting (learning rate, weight decay, warm-up)
has the best mean validation score over seeds.  The reported splits never influence this choice.
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyhead.config import Run, TransformerConfig
from polyhead.papers.claims import Estimate
from polyhead.papers.sizes import Setting
from polyhead.scale.sweep import Failure
from polyhead.tasks.record import RECORD
from polyhead.train import Result
from polyhead.train.store.folder import METRICS, RESULT, read_metrics

Axis = Callable[[Run], Any]


def _heads(run: Run) -> int | None:
    model = run.model
    return sum(group.heads for group in model.layer_heads(0)) if isinstance(model, TransformerConfig) else None


AXES: dict[str, Axis] = {
    "task": lambda run: run.task.name,
    "lr": lambda run: run.train.lr,
    "length": lambda run: run.task.length,
    "instances": lambda run: run.train.steps * run.train.batch_size,
    "width": lambda run: getattr(run.model, "dim", None),
    "depth": lambda run: getattr(run.model, "layers", None),
    "heads": _heads,
}
"""The axes that figures of any paper may use."""

TRAINING_LOSS = "training loss"
"""A value for `split` that stands for the training loss."""
LAST = 5  # the number of last logged training losses to average

Coordinates = tuple[Any, ...]
"""The values of a run on some axes of a study, such as (64, "softmax")."""


@dataclass(frozen=True)
class Paper:
    """A paper, or a family of papers, whose figures are reproduced.

    `row_of`: the name of the model that a run trains; `label`: the model's label in figures.  `axes`: the axes of its
    figures in addition to `AXES`.
    """

    title: str
    row_of: Callable[[Run], str]
    label: Callable[[str], str]
    axes: Mapping[str, Axis] = field(default_factory=dict)

    def places(self, run: Run) -> dict[str, Any]:
        """The value of a run on each axis that it has."""
        places = {}
        for axis, read in {"model": self.row_of, **AXES, **self.axes}.items():
            value = read(run)
            if value is not None:
                places[axis] = value
        return places


@dataclass(frozen=True)
class FinishedRun:
    """One finished run.

    `courses`: the scores of its main metric during training, by split and optimiser step, and its `TRAINING_LOSS` at
    the last one, where the run's folder is gone; None: they are in the folder.  `text`: the fingerprint of its text,
    likewise.
    """

    run: Run
    result: Result
    courses: Mapping[str, Mapping[int, float]] | None = None
    text: str | None = None

    @property
    def setting(self) -> Setting:
        train = self.run.train
        return Setting(train.lr, train.weight_decay, train.warmup)

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
        """The scores on `split` during training, by optimiser step."""
        name = metric or self.run.task.metric
        if self.courses is not None:
            if name != self.run.task.metric or split not in self.courses:
                raise ValueError(f"{self.run.name}: no {name} on {split} during training is kept")
            return dict(self.courses[split])
        rows = [row for row in read_metrics(self.result.folder) if row["kind"] == "eval" and row["split"] == split]
        if not rows:
            raise ValueError(f"{self.result.folder / METRICS}: no row of {split}; delete the folder to train again")
        return {row["step"]: float(row[name]) for row in rows}

    def read_courses(self) -> dict[str, dict[str, float]]:
        """`courses` as the run's folder has them, scores to six digits, as JSON."""
        metric, found = self.run.task.metric, dict[str, dict[str, float]]()
        if (loss := self._last_losses()) is not None:
            found[TRAINING_LOSS] = {str(self.result.steps): loss}
        for row in read_metrics(self.result.folder):
            if row["kind"] == "eval" and metric in row:
                found.setdefault(row["split"], {})[str(row["step"])] = round(float(row[metric]), 6)
        return found

    def fingerprint(self) -> str | None:
        """The fingerprint of its text or files; None if its data are generated, or where it was not kept."""
        try:
            return self.text or str(json.loads((self.result.folder / RECORD).read_bytes())["fingerprint"])
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None

    def training_loss(self) -> float:
        """The mean of the last logged training losses."""
        if self.courses is not None:
            if TRAINING_LOSS not in self.courses:
                raise ValueError(f"{self.run.name}: no {TRAINING_LOSS} is kept")
            return max(self.courses[TRAINING_LOSS].items())[1]
        if (loss := self._last_losses()) is None:
            raise ValueError(f"{self.result.folder / METRICS}: no row of training; delete the folder to train again")
        return loss

    def _last_losses(self) -> float | None:
        rows = [row["loss"] for row in read_metrics(self.result.folder) if row["kind"] == "train"][-LAST:]
        return float(sum(rows) / len(rows)) if rows else None


@dataclass(frozen=True)
class Cell:
    """The runs of the selected setting, one per seed, and the number of searched settings."""

    setting: Setting
    points: tuple[FinishedRun, ...]
    tried: int
    validation: Estimate

    def score(self, split: str, metric: str | None = None) -> Estimate:
        """The score over seeds, with the error from finite test sets: that of one set does not fall with more seeds."""
        errors = [point.sampling(split, metric) for point in self.points]
        values = {point.run.seed: point.score(split, metric) for point in self.points}
        tasks = {point.run.task for point in self.points}
        if all(task.shared(split) for task in tasks):
            test = f"{split} of {sorted(map(repr, tasks))}"
            return Estimate.of(values, math.fsum(errors) / len(errors), finite=True, test=test)
        finite = any(task.count(split) is not None for task in tasks)
        return Estimate.of(values, math.hypot(*errors) / len(errors), finite=finite)

    def course(self, split: str, metric: str | None = None) -> dict[int, list[float]]:
        """The scores of its seeds, by optimiser step."""
        found: dict[int, list[float]] = {}
        for point in self.points:
            for step, score in point.course(split, metric).items():
                found.setdefault(step, []).append(score)
        return found

    def training_loss(self) -> Estimate:
        return Estimate.of({point.run.seed: point.training_loss() for point in self.points})


@dataclass(frozen=True)
class Study:
    """The finished and the failed runs of a figure."""

    figure: str
    paper: Paper
    scale: str
    folder: pathlib.Path
    points: tuple[FinishedRun, ...]
    failures: tuple[Failure, ...] = ()

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
        pairs = list(zip(runs, outcomes, strict=True))
        points = tuple(FinishedRun(run, outcome) for run, outcome in pairs if isinstance(outcome, Result))
        return cls(figure, paper, scale, folder, points, tuple(o for _, o in pairs if isinstance(o, Failure)))

    def searched(self, *axes: str, task: str | None = None) -> dict[Coordinates, dict[Setting, list[FinishedRun]]]:
        """Return the runs by place on `axes` and by setting, in the order of the runs; `task`: only of this task."""
        runs: dict[Coordinates, dict[Setting, list[FinishedRun]]] = {}
        for point in self.points:
            places = self.paper.places(point.run)
            if task in (None, places["task"]):
                condition = tuple(places.get(axis) for axis in axes)
                runs.setdefault(condition, {}).setdefault(point.setting, []).append(point)
        return runs

    def cells(self, *axes: str, task: str | None = None) -> dict[Coordinates, Cell]:
        """Return the selected cells by place on `axes`, in the order of the runs; `task`: only of this task."""
        return {condition: select(by_setting) for condition, by_setting in self.searched(*axes, task=task).items()}


def select(by_setting: dict[Setting, list[FinishedRun]]) -> Cell:
    """Return the setting with the best mean validation score, among settings with the most finished seeds."""
    num_seeds = max(len(points) for points in by_setting.values())
    estimates: dict[Setting, Estimate] = {}
    ranks: dict[Setting, float] = {}
    for setting, points in by_setting.items():
        if len(points) == num_seeds:
            estimates[setting] = over_seeds(points, "validation")
            mean = estimates[setting].mean
            ranks[setting] = -math.inf if math.isnan(mean) else points[0].run.task.gain(mean)
    best = max(ranks, key=ranks.__getitem__)
    return Cell(best, tuple(by_setting[best]), len(by_setting), estimates[best])


def over_seeds(points: Iterable[FinishedRun], split: str) -> Estimate:
    """The score of runs that differ only in their seeds."""
    return Estimate.of({point.run.seed: point.score(split) for point in points})
