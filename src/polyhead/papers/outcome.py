"""The result of a figure or table: pictures, a table, verdicts, and their numbers."""

import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyhead.config import Run
from polyhead.papers.claims import Estimate, Verdict, judge
from polyhead.papers.study import TRAINING_LOSS, Cell, Coordinates, Study
from polyhead.tasks import Score

FLOOR_SEQUENCES = 1000
SEEN = "standard errors over seeds, a dot per seed"
"""The standard caption of pictures of scores."""

Cells = Mapping[Coordinates, Mapping[str, Cell]]
"""The cells of a figure, by place on its axes, then by model."""
Levels = dict[str, Estimate]
Panel = tuple[str, Mapping[str, Mapping[Any, list[float]]], Mapping[str, Any]]
"""One panel of a picture: title, series and floors."""


@dataclass(frozen=True)
class FigureOutcome:
    """The result of a figure.

    `pictures`: (file stem, caption), each written as .png and .svg.  `table`: head and rows as text; its numbers are
    measured unless the head says "paper".  `numbers`: the numbers of the pictures as JSON.
    """

    pictures: tuple[tuple[str, str], ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Correct the p-values of the page's claims together."""
        object.__setattr__(self, "verdicts", judge(self.verdicts))


def seen(cells: Iterable[Cell]) -> str:
    """What a picture shows of the seeds of `cells`, for its caption."""
    return SEEN if any(len(cell.points) > 1 for cell in cells) else "one seed"


def runs_of(cells: Mapping[Any, Cell]) -> list[Run]:
    return [point.run for cell in cells.values() for point in cell.points]


def floors(runs: Iterable[Run], split: str = "compositional") -> Levels:
    """Floors and ceiling on `split` of the tasks of `runs`, which differ only in the split's seed.

    Each is a mean over the splits, with values by seed if every seed has its own split.  A split has sequences of its
    own, too: on common ones the sampling errors would be common, and not fall with their number as the mean's does.
    """
    tasks = dict.fromkeys((run.seed, run.task) for run in runs if hasattr(run.task, "floors"))
    each = dict.fromkeys(task for _, task in tasks)
    tables = {task: _floors(task, split, FLOOR_SEQUENCES, stream) for stream, task in enumerate(each)}
    found: Levels = {}
    for name in next(iter(tables.values()), {}):
        score = Score.over([table[name] for table in tables.values()])
        sampled = score.count - 1 if score.count else math.inf  # an exact floor has no error
        freedom = sampled if len(tables) == 1 else len(tables) - 1
        alone = len(tables) == len(tasks) > 1
        by_seed = {seed: tables[task][name].mean for seed, task in tasks} if alone else {}
        found[name] = Estimate(score.mean, score.standard_error, float(freedom), by_seed)
    return found


@functools.lru_cache(maxsize=512)
def _floors(task: Any, split: str, sequences: int, seed: int) -> Mapping[str, Score]:
    found: Mapping[str, Score] = task.floors(split, sequences=sequences, seed=seed)
    return found


def shown(runs: Iterable[Run], levels: Mapping[str, object]) -> dict[str, str]:
    """The most informative floors among `levels`, for figures, and the ceiling; name -> label."""
    words = {name: floor for run in runs for name, floor in run.task.words.floors.items() if floor.drawn}
    return {name: floor.label for name, floor in words.items() if name in levels}


def drawn(runs: Iterable[Run], levels: Levels) -> dict[str, float]:
    """The floors that a picture shows, by label."""
    return {label: levels[name].mean for name, label in shown(runs, levels).items()}


def beside(cells: Mapping[Any, Cell], split: str) -> dict[str, Estimate]:
    """The drawn floors of the tasks of `cells`, by label; none if the tasks lack the split."""
    runs = [run for run in runs_of(cells) if split in run.task.splits]
    levels = floors(runs, split)
    return {label: levels[name] for name, label in shown(runs, levels).items()}


def floors_along(cells: Mapping[Any, Mapping[str, Cell]], split: str) -> dict[str, dict[Any, float]]:
    """{label: {x: mean of a drawn floor}} from {x: {model: cell}}."""
    found: dict[str, dict[Any, float]] = {}
    for x, by in cells.items():
        for label, level in beside(by, split).items():
            found.setdefault(label, {})[x] = level.mean
    return found


def by_model(study: Study, *axes: str, task: str | None = None) -> dict[Coordinates, dict[str, Cell]]:
    """Cells by place on `axes`, then by model."""
    found: dict[Coordinates, dict[str, Cell]] = {}
    for place, cell in study.cells(*axes, "model", task=task).items():
        found.setdefault(place[:-1], {})[place[-1]] = cell
    return found


def whole(cells: Mapping[Any, Mapping[str, Cell]]) -> bool:
    """Whether the places form a full grid and each has every model: no cell is missing because of failed runs."""
    models = {model for cell in cells.values() for model in cell}
    full = math.prod(len(set(values)) for values in zip(*cells, strict=True))
    return bool(cells) and len(cells) == full and all(set(cell) == models for cell in cells.values())


def scores(cells: Mapping[str, Cell], split: str, metric: str | None = None) -> dict[str, Estimate]:
    return {model: cell.score(split, metric) for model, cell in cells.items()}


def series(
    points: Mapping[Any, Mapping[str, Estimate]], label: Callable[[str], str]
) -> dict[str, dict[Any, list[float]]]:
    """{label: {x: scores of the seeds}} from {x: {model: score}}."""
    found: dict[str, dict[Any, list[float]]] = {}
    for x, by in points.items():
        for model, estimate in by.items():
            found.setdefault(label(model), {})[x] = list(estimate.values.values())
    return found


def scored(cell: Cell, split: str) -> Estimate:
    """The score on a split, or the training loss."""
    return cell.training_loss() if split == TRAINING_LOSS else cell.score(split)


def settings_note(cells: Iterable[Cell]) -> str:
    """The selected settings as a line."""
    return f"Settings: {'; '.join(sorted({setting_text(cell) for cell in cells}))}."


def setting_text(cell: Cell) -> str:
    """The selected learning rate, weight decay and warm-up, and the number of searched settings."""
    s = cell.setting
    return f"lr {s.lr:g}, wd {s.weight_decay:g}, warm-up {s.warmup} (of {cell.tried})"


def numbers(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON: mean, standard error (null for one seed), values by seed."""
    values = {str(seed): value for seed, value in estimate.values.items()}
    error = None if math.isnan(estimate.error) else estimate.error
    return {"mean": estimate.mean, "standard_error": error, "by_seed": values}


def both(stem: str, folder: pathlib.Path) -> Sequence[pathlib.Path]:
    """The two files of a picture."""
    return [folder / f"{stem}.png", folder / f"{stem}.svg"]
