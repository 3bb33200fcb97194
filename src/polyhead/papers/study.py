"""The finished runs of a figure as a table: axes of the figure, settings searched, the one selected on validation.

A cell of a figure is one model at one point of the axes.  Among the settings that were searched there (learning rate,
weight decay, warm-up) the one with the best mean validation score over seeds is reported; the reported splits are
never looked at for that.
"""

import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead.config import Mlp, Run, Swiglu, TransformerConfig
from polyhead.papers.dual import models as dual_models
from polyhead.papers.hyla.claims import Estimate
from polyhead.papers.hyla.rows import OURS, ROWS, row_of
from polyhead.papers.language import models as lm_models
from polyhead.papers.sizes import Setting
from polyhead.scale.sweep import Failure
from polyhead.tasks import FuzzyLogic, Images, Sraven, Text
from polyhead.train import Result
from polyhead.train.store.folder import METRICS, RESULT, read_metrics

LABELS = {name: row.label for name, row in (ROWS | OURS).items()} | {
    name: row.label for name, row in (dual_models.ROWS | lm_models.ROWS).items()
}


def _model(run: Run) -> str:
    """Its row, of the study that its task belongs to."""
    if isinstance(run.task, Text):
        return lm_models.row_of(run)
    return row_of(run) if isinstance(run.task, (FuzzyLogic, Sraven)) else dual_models.row_of(run)


def _heads(model: TransformerConfig) -> int:
    return sum(group.heads for group in model.layer_heads(0))


def _symbols(run: Run) -> str | None:
    """Where the symbols of its relational heads come from."""
    group = dual_models.relational_of(run)
    return None if group is None else {type(s): n for n, s in dual_models.SYMBOLS.items()}[type(group.symbols)]


def _relations(run: Run) -> int | None:
    group = dual_models.relational_of(run)
    return None if group is None else group.relations or group.heads


def _positions(run: Run) -> str | None:
    """Of a model with relational heads."""
    if dual_models.relational_of(run) is None:
        return None
    return type(dual_models.encoder_of(run).positions).__name__.lower()


def _feedforward(run: Run) -> str | None:
    """Of a language model."""
    layer = getattr(run.model, "feedforward", None) if isinstance(run.task, Text) else None
    names = {"silu": "SiLU", "relu": "ReLU", "gelu_tanh": "GELU"}
    return "SwiGLU" if isinstance(layer, Swiglu) else names[layer.act] if isinstance(layer, Mlp) else None


AXES: dict[str, Callable[[Run], Any]] = {
    "task": lambda run: "fuzzy" if run.task.name == "fuzzy_logic" else run.task.name,
    "model": _model,
    "game": lambda run: getattr(run.task, "game", None),
    "examples": lambda run: getattr(run.task, "examples", None),
    "module": lambda run: getattr(run.task, "module", None),
    "data": lambda run: run.task.data if isinstance(run.task, Images) else None,
    "symbols": _symbols,
    "relations": _relations,
    "symmetric": lambda run: getattr(dual_models.relational_of(run), "symmetric", None),
    "positions": _positions,
    "split": lambda run: None if isinstance(run.task, (FuzzyLogic, Sraven, Text)) else dual_models.split_of(run),
    "feedforward": _feedforward,
    "norm order": lambda run: run.transformer.norm_order if isinstance(run.task, Text) else None,
    "lr": lambda run: run.train.lr,
    "length": lambda run: run.task.length,
    "held out": lambda run: getattr(run.task, "held_out", None),
    "features": lambda run: getattr(run.task, "features", None),
    "instances": lambda run: run.train.steps * run.train.batch_size,
    "width": lambda run: getattr(run.model, "dim", None),
    "depth": lambda run: getattr(run.model, "layers", None),
    "heads": lambda run: _heads(run.model) if isinstance(run.model, TransformerConfig) else None,
}
"""What a figure may be drawn over."""

LAST = 5  # logged training losses that are averaged


def label(model: str) -> str:
    """What a reader sees of a row of Table A1, or of a model of the dual-attention study."""
    return LABELS[model]


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

    def course(self, split: str, metric: str | None = None) -> dict[int, float]:
        """Its score on `split` by optimiser step, as it was evaluated in training."""
        name = metric or self.run.task.metric
        rows = [row for row in read_metrics(self.result.folder) if row["kind"] == "eval" and row["split"] == split]
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
        """Over seeds."""
        return Estimate.of({point.run.seed: point.score(split, metric) for point in self.points})

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
    scale: str
    folder: pathlib.Path
    points: tuple[Point, ...]
    failures: tuple[Failure, ...] = ()

    @classmethod
    def of(
        cls, figure: str, scale: str, folder: pathlib.Path, runs: Sequence[Run], outcomes: Sequence[Result | Failure]
    ) -> "Study":
        """From what a sweep returned, in its order."""
        pairs = list(zip(runs, outcomes, strict=True))
        points = tuple(Point(run, outcome) for run, outcome in pairs if isinstance(outcome, Result))
        return cls(figure, scale, folder, points, tuple(o for _, o in pairs if isinstance(o, Failure)))

    def cells(self, *axes: str, task: str | None = None) -> dict[tuple[Any, ...], Cell]:
        """Selected cells by their place on `axes`, in the order of the runs; of one task only if `task` says so."""
        found: dict[tuple[Any, ...], dict[Setting, list[Point]]] = defaultdict(lambda: defaultdict(list))
        for point in self.points:
            if task in (None, AXES["task"](point.run)):
                found[tuple(AXES[axis](point.run) for axis in axes)][point.setting].append(point)
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
