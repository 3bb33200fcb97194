"""The finished runs of a figure as a table: axes of the figure, settings searched, the one selected on validation.

A cell of a figure is one model at one point of the axes.  Among the settings that were searched there (learning rate,
weight decay, warm-up) the one with the best mean validation score over seeds is reported; the reported splits are
never looked at for that.
"""

import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyhead.config import Run, TransformerConfig
from polyhead.papers.estimates import Estimate
from polyhead.papers.sizes import Setting
from polyhead.scale.sweep import Failure
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
"""What the figures of any paper may be drawn over."""

LAST = 5  # logged training losses that are averaged


@dataclass(frozen=True)
class Paper:
    """A paper whose figures are reproduced, or a family of them.

    `row_of`: the name of the model that a run trains, `label`: what a reader sees of it.  `axes`: what its figures are
    drawn over, beside `AXES`.
    """

    title: str
    row_of: Callable[[Run], str]
    label: Callable[[str], str]
    axes: Mapping[str, Axis] = field(default_factory=dict)

    def places(self, run: Run) -> dict[str, Any]:
        """Where a run stands on every axis that it has."""
        axes = {"model": self.row_of, **AXES, **self.axes}
        return {axis: place for axis, read in axes.items() if (place := read(run)) is not None}


@dataclass(frozen=True)
class Point:
    """One finished run."""

    run: Run
    result: Result

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
        """The standard error of `score` over the sequences of the test; 0 where it is not known."""
        return float(self.result.scores[split].get(f"{metric or self.run.task.metric}_se", 0.0))

    def course(self, split: str, metric: str | None = None) -> dict[int, float]:
        """Its score on `split` by optimiser step, as it was evaluated in training."""
        name = metric or self.run.task.metric
        rows = [row for row in read_metrics(self.result.folder) if row["kind"] == "eval" and row["split"] == split]
        if not rows:
            raise ValueError(f"{self.result.folder / METRICS}: no row of {split}; delete the folder to train again")
        return {row["step"]: float(row[name]) for row in rows}

    def training_loss(self) -> float:
        """Mean of the last logged losses on training batches."""
        rows = [row["loss"] for row in read_metrics(self.result.folder) if row["kind"] == "train"]
        if not rows:
            raise ValueError(f"{self.result.folder / METRICS}: no row of training; delete the folder to train again")
        return float(sum(rows[-LAST:]) / len(rows[-LAST:]))


@dataclass(frozen=True)
class Cell:
    """The runs of the selected setting, one per seed, and how many settings there were to select from."""

    setting: Setting
    points: tuple[Point, ...]
    tried: int
    validation: Estimate

    def score(self, split: str, metric: str | None = None) -> Estimate:
        """Over seeds, with the error that the test sets give to their mean."""
        errors = [point.sampling(split, metric) for point in self.points]
        finite = any(point.run.task.count(split) is not None for point in self.points)
        values = {point.run.seed: point.score(split, metric) for point in self.points}
        return Estimate.of(values, math.hypot(*errors) / len(errors), finite=finite)

    def course(self, split: str, metric: str | None = None) -> dict[int, list[float]]:
        """Of its seeds, by optimiser step."""
        found: dict[int, list[float]] = {}
        for point in self.points:
            for step, score in point.course(split, metric).items():
                found.setdefault(step, []).append(score)
        return found

    def training_loss(self) -> Estimate:
        return Estimate.of({point.run.seed: point.training_loss() for point in self.points})


@dataclass(frozen=True)
class Study:
    """All runs of a figure that are finished, and those that failed."""

    figure: str
    paper: Paper
    scale: str
    folder: pathlib.Path
    points: tuple[Point, ...]
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
        """From what a sweep returned, in its order."""
        pairs = list(zip(runs, outcomes, strict=True))
        points = tuple(Point(run, outcome) for run, outcome in pairs if isinstance(outcome, Result))
        return cls(figure, paper, scale, folder, points, tuple(o for _, o in pairs if isinstance(o, Failure)))

    def cells(self, *axes: str, task: str | None = None) -> dict[tuple[Any, ...], Cell]:
        """Selected cells by their place on `axes`, in the order of the runs; of one task only if `task` says so."""
        found: dict[tuple[Any, ...], dict[Setting, list[Point]]] = defaultdict(lambda: defaultdict(list))
        for point in self.points:
            places = self.paper.places(point.run)
            if task in (None, places["task"]):
                found[tuple(places.get(axis) for axis in axes)][point.setting].append(point)
        return {place: select(by_setting) for place, by_setting in found.items()}


def select(by_setting: dict[Setting, list[Point]]) -> Cell:
    """The setting with the best mean validation score among those with the most finished seeds."""
    most = max(len(points) for points in by_setting.values())
    whole = {setting: points for setting, points in by_setting.items() if len(points) == most}
    scores = {
        setting: Estimate.of({point.run.seed: point.score("validation") for point in points})
        for setting, points in whole.items()
    }
    means = {setting: score.mean for setting, score in scores.items()}
    task = next(iter(whole.values()))[0].run.task
    best = max(whole, key=lambda setting: -math.inf if math.isnan(means[setting]) else task.gain(means[setting]))
    return Cell(best, tuple(whole[best]), len(by_setting), scores[best])
