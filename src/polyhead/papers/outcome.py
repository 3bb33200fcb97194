"""The result of a figure or table: pictures, a table, verdicts and their numbers; and what most figures compute."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyhead.config import Run
from polyhead.papers.claims import Estimate, Verdict, judge
from polyhead.papers.study import TRAINING_LOSS, Cell, Coordinates, Study
from polyhead.tasks import Score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE_SEQUENCES = 1000
SEED_CAPTION = "standard errors over seeds, a dot per seed"
"""The standard caption of pictures of scores."""

Cells = Mapping[Coordinates, Mapping[str, Cell]]
"""The cells of a figure, by place on its axes, then by model."""
Baselines = dict[str, Estimate]
Panel = tuple[str, Mapping[str, Mapping[Any, list[float]]], Mapping[str, Any]]
"""One panel of a picture: title, curves and baselines."""


@dataclass(frozen=True)
class Picture:
    """A picture of a page.  `stem`: the name of its files without suffix."""

    stem: str
    caption: str
    figure: "Figure" = field(compare=False)


@dataclass(frozen=True)
class FigureOutcome:
    """The result of a figure.

    `head`, `rows`: the table as text; its numbers are measured unless the head says "paper".  `numbers`: the numbers of
    the pictures as JSON values.
    """

    pictures: tuple[Picture, ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Correct the p-values of the page's claims together."""
        object.__setattr__(self, "verdicts", judge(self.verdicts))


def seed_caption(cells: Iterable[Cell]) -> str:
    """Return what a picture of `cells` shows of their seeds, for its caption."""
    return SEED_CAPTION if any(len(cell.points) > 1 for cell in cells) else "one seed"


# ----------------------------------------------------------------------------------------------------------- baselines
def runs_of(cells: Mapping[Any, Cell]) -> list[Run]:
    runs = []
    for cell in cells.values():
        runs += [point.run for point in cell.points]
    return runs


def baselines(runs: Iterable[Run], split: str = "compositional") -> Baselines:
    """Return the baselines and the ceiling on `split` of the tasks of `runs`, which differ only in the split's seed.

    Each is a mean over the splits, with values by seed if every seed has its own split.  A split has sequences of its
    own, too: on common ones the sampling errors would be common, and not fall with their number as the mean's does.
    """
    task_of_seed = {run.seed: run.task for run in runs if hasattr(run.task, "baselines")}
    scores_of_task: dict[Any, Mapping[str, Score]] = {}
    for task in task_of_seed.values():
        if task not in scores_of_task:
            scores_of_task[task] = _baseline_scores(task, split, BASELINE_SEQUENCES, len(scores_of_task))
    split_count = len(scores_of_task)
    one_split_per_seed = split_count == len(task_of_seed) > 1
    estimates: Baselines = {}
    for name in next(iter(scores_of_task.values()), {}):
        score = Score.over([scores[name] for scores in scores_of_task.values()])
        if split_count > 1:
            freedom = split_count - 1.0
        elif score.count:
            freedom = score.count - 1.0
        else:  # known exactly, so without an error
            freedom = math.inf
        by_seed = {}
        if one_split_per_seed:
            by_seed = {seed: scores_of_task[task][name].mean for seed, task in task_of_seed.items()}
        estimates[name] = Estimate(score.mean, score.standard_error, freedom, by_seed)
    return estimates


@functools.lru_cache(maxsize=512)
def _baseline_scores(task: Any, split: str, sequences: int, seed: int) -> Mapping[str, Score]:
    scores: Mapping[str, Score] = task.baselines(split, sequences=sequences, seed=seed)
    return scores


def baseline_labels(runs: Iterable[Run], names: Iterable[str]) -> dict[str, str]:
    """Return name -> label of the most informative baselines among `names`, and of the ceiling."""
    labels = {}
    for run in runs:
        for name, words in run.task.words.baselines.items():
            if words.drawn and name in names:
                labels[name] = words.label
    return labels


def baseline_means(runs: Iterable[Run], estimates: Baselines) -> dict[str, float]:
    """Return the baselines that a picture shows, by label."""
    return {label: estimates[name].mean for name, label in baseline_labels(runs, estimates).items()}


def labelled_baselines(cells: Mapping[Any, Cell], split: str) -> dict[str, Estimate]:
    """Return the drawn baselines of the tasks of `cells`, by label; none if the tasks lack the split."""
    runs = [run for run in runs_of(cells) if split in run.task.splits]
    estimates = baselines(runs, split)
    return {label: estimates[name] for name, label in baseline_labels(runs, estimates).items()}


def baseline_curves(cells: Mapping[Any, Mapping[str, Cell]], split: str) -> dict[str, dict[Any, float]]:
    """Return {label: {x: mean of a drawn baseline}} from {x: {model: cell}}."""
    curves: dict[str, dict[Any, float]] = {}
    for x, cells_at_x in cells.items():
        for label, estimate in labelled_baselines(cells_at_x, split).items():
            curves.setdefault(label, {})[x] = estimate.mean
    return curves


# --------------------------------------------------------------------------------------------------------------- cells
def cells_by_model(study: Study, *axes: str, task: str | None = None) -> dict[Coordinates, dict[str, Cell]]:
    """Return cells by place on `axes`, then by model."""
    cells: dict[Coordinates, dict[str, Cell]] = {}
    for condition, cell in study.cells(*axes, "model", task=task).items():
        cells.setdefault(condition[:-1], {})[condition[-1]] = cell
    return cells


def is_complete_grid(cells: Mapping[Any, Mapping[str, Cell]]) -> bool:
    """Return whether the places form a full grid and each has every model: no run failed."""
    models: set[str] = set()
    for by_model in cells.values():
        models |= set(by_model)
    places = math.prod(len(set(values)) for values in zip(*cells, strict=True))
    return bool(cells) and len(cells) == places and all(set(by_model) == models for by_model in cells.values())


def scores_by_model(cells: Mapping[str, Cell], split: str, metric: str | None = None) -> dict[str, Estimate]:
    return {model: cell.score(split, metric) for model, cell in cells.items()}


def score_curves(
    points: Mapping[Any, Mapping[str, Estimate]], label: Callable[[str], str]
) -> dict[str, dict[Any, list[float]]]:
    """Return {label: {x: scores of the seeds}} from {x: {model: score}}."""
    curves: dict[str, dict[Any, list[float]]] = {}
    for x, by_model in points.items():
        for model, estimate in by_model.items():
            curves.setdefault(label(model), {})[x] = list(estimate.values.values())
    return curves


def score_or_training_loss(cell: Cell, split: str) -> Estimate:
    """Return the score on a split, or the training loss."""
    return cell.training_loss() if split == TRAINING_LOSS else cell.score(split)


def settings_note(cells: Iterable[Cell]) -> str:
    """Return the selected settings as a line."""
    return f"Settings: {'; '.join(sorted({setting_text(cell) for cell in cells}))}."


def settings_of(cells: Mapping[Any, Mapping[str, Cell]]) -> str:
    """Return the selected settings of all cells as a line."""
    flat: list[Cell] = []
    for by_model in cells.values():
        flat += by_model.values()
    return settings_note(flat)


def setting_text(cell: Cell) -> str:
    """Return the selected learning rate, weight decay and warm-up, and the number of searched settings."""
    setting = cell.setting
    return f"lr {setting.lr:g}, wd {setting.weight_decay:g}, warm-up {setting.warmup} (of {cell.tried})"
