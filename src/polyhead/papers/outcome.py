"""A figure or table of a paper, its result (pictures, a table, verdicts, numbers), and what most figures compute.

The cells of a figure are a pandas series, as `Study.cells` returns it.  Its index has a level for each axis; mostly
the last is "model".  The scores of the cells are a series with the same index.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from polyhead.analysis.claims import Estimate, Verdict, judge
from polyhead.config import Run
from polyhead.papers.study import Cell, Paper, Study
from polyhead.tasks import Score

if TYPE_CHECKING:
    import matplotlib.figure
    from pandas import DataFrame, Series

BASELINE_SEQUENCES = 1000
# The standard caption of pictures of scores.
SEED_CAPTION = "standard errors over seeds, a dot per seed"

# Cells, or numbers of them, by condition; pandas is imported when a figure is drawn.
Cells: TypeAlias = "Series"
# Numbers with a row per condition and a column per model.
Table: TypeAlias = "DataFrame"
# The rows of a table as text, and the same as JSON values.
Rows = tuple[list[dict[str, str]], dict[str, Any]]
Draw = Callable[[Study], "FigureOutcome"]
Runs = Callable[[str], tuple[Run, ...]]
# Label -> x -> the scores of the seeds.
Curves = dict[str, dict[Any, list[float]]]
# One panel of a picture: title, curves and baselines.
Panel = tuple[str, Mapping[str, Mapping[Any, list[float]]], Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A figure or table.

    Attributes:
        draw: Called with the study of the finished runs; for a figure without training with the scale.
        runs: Maps a scale to the runs, or None for a figure without training.
        minutes: Core minutes of all runs at the small scale, one thread each, on a busy machine (docs/results).
        gpu: GPU minutes of one run at paper scale, by the paper.
        short: Whether the scale `short` exists.
    """

    title: str
    paper: Paper
    draw: Callable[..., "FigureOutcome"]
    runs: Runs | None = None
    minutes: int | float | None = None
    gpu: str = ""
    short: bool = False


@dataclass(frozen=True)
class Picture:
    """A picture of a page.  `stem`: the name of its files without suffix."""

    stem: str
    caption: str
    figure: "matplotlib.figure.Figure" = field(compare=False)


@dataclass(frozen=True)
class FigureOutcome:
    """The result of a figure.

    Attributes:
        table: Rows by name of column; numbers are measured unless the column says "paper".
        numbers: The numbers of the pictures as JSON values.
    """

    pictures: Sequence[Picture] = ()
    table: Sequence[Mapping[str, str]] = ()
    verdicts: Sequence[Verdict] = ()
    notes: Sequence[str] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Correct the p-values of the page's claims together."""
        object.__setattr__(self, "verdicts", judge(self.verdicts))

    @property
    def frame(self) -> "DataFrame":
        """The table; a column that a row lacks has a dash."""
        import pandas

        return pandas.DataFrame(self.table, dtype=object).fillna("–")

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the columns, in the order in which the rows have them."""
        return tuple(self.frame)

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows as text."""
        return tuple(self.frame.itertuples(index=False, name=None))


# -------------------------------------------------------------------------------------------------------------- scores
def scores_of(cells: Cells, split: str) -> Cells:
    """Return the estimates of all cells on a split."""
    return cells.map(lambda cell: cell.score(split))


def score_table(cells: Cells, split: str) -> Table:
    """Return the estimates with a row for each condition and a column for each model, in the order of the runs."""
    return scores_of(cells, split).unstack("model", sort=False)


def differences(table: Table, first: Any, second: Any) -> Cells:
    """Return column `first` minus column `second` at each condition that has both."""
    both = table.reindex(columns=[first, second]).dropna()
    return both[first] - both[second]


def is_complete_grid(cells: Cells) -> bool:
    """Return whether the conditions form a full grid and each has every model; of some a seed may have failed."""
    names = cells.index.names
    return len(cells) > 0 and len(cells) == math.prod(cells.index.unique(name).size for name in names)


# ------------------------------------------------------------------------------------------------------------- drawing
def curves(scores: Cells, label: Callable[[str], str]) -> Curves:
    """Return {label: {x: scores of the seeds}} from scores by x and model."""
    by_label: Curves = {}
    for (x, model), estimate in scores.items():
        by_label.setdefault(label(model), {})[x] = estimate.by_seed
    return by_label


def panels(
    cells: Cells,
    split: str,
    label: Callable[[str], str],
    title: Callable[[Any], str],
    levels: Callable[[Cells], Mapping[str, Any]],
) -> list[Panel]:
    """Return a panel for each value of the first axis, with the second axis on x and a line per model.

    Args:
        title: Maps the value to the title.
        levels: Maps the cells of a panel to its baselines.
    """
    drawn: list[Panel] = []
    for value, rows in cells.groupby(level=0, sort=False):
        in_panel = rows.droplevel(0)
        drawn.append((title(value), curves(scores_of(in_panel, split), label), levels(in_panel)))
    return drawn


# ----------------------------------------------------------------------------------------------------------- baselines
def runs_of(cells: Iterable[Cell]) -> list[Run]:
    """Return the runs of all cells."""
    runs = []
    for cell in cells:
        for point in cell.points:
            runs.append(point.run)
    return runs


def baselines(runs: Iterable[Run], split: str = "compositional") -> dict[str, Estimate]:
    """Return the baselines and the ceiling on `split` of the tasks of `runs`, which differ only in the split's seed.

    Each is a mean over the splits, with values by seed if every seed has its own split.  A split has sequences of its
    own, too: on common ones the sampling errors would be common, and not fall with their number as the mean's does.
    """
    # All models of a seed share its task.
    task_of_seed = {run.seed: run.task for run in runs if hasattr(run.task, "baselines")}
    scores_of_task: dict[Any, Mapping[str, Score]] = {}
    for task in task_of_seed.values():
        if task not in scores_of_task:
            scores_of_task[task] = _baseline_scores(task, split, BASELINE_SEQUENCES, len(scores_of_task))
    split_count = len(scores_of_task)
    one_split_per_seed = split_count > 1 and split_count == len(task_of_seed)
    estimates = {}
    for name in next(iter(scores_of_task.values()), {}):
        mean_score = Score.over([scores[name] for scores in scores_of_task.values()])
        if split_count > 1:
            freedom = split_count - 1.0
        elif mean_score.count:
            freedom = mean_score.count - 1.0
        else:  # known exactly, so without an error
            freedom = math.inf
        by_seed = {}
        if one_split_per_seed:
            for seed, task in task_of_seed.items():
                by_seed[seed] = scores_of_task[task][name].mean
        estimates[name] = Estimate(mean_score.mean, mean_score.standard_error, freedom, by_seed)
    return estimates


@functools.lru_cache(maxsize=512)
def _baseline_scores(task: Any, split: str, sequences: int, seed: int) -> Mapping[str, Score]:
    scores: Mapping[str, Score] = task.baselines(split, sequences=sequences, seed=seed)
    return scores


def drawn_baselines(runs: Iterable[Run], split: str = "compositional") -> dict[str, Estimate]:
    """Return the most informative baselines and the ceiling by label; none if the tasks lack the split."""
    runs = [run for run in runs if split in run.task.splits]
    estimates = baselines(runs, split)
    by_label = {}
    for run in runs:
        for name, words in run.task.words.baselines.items():
            if words.drawn and name in estimates:
                by_label[words.label] = estimates[name]
    return by_label


def baseline_means(runs: Iterable[Run], split: str = "compositional") -> dict[str, float]:
    """Return the baselines that a picture shows, by label."""
    return {label: estimate.mean for label, estimate in drawn_baselines(runs, split).items()}


def baseline_curves(cells: Cells, split: str) -> dict[str, dict[Any, float]]:
    """Return {label: {x: mean of a drawn baseline}} from cells by x and model."""
    by_label: dict[str, dict[Any, float]] = {}
    for x, rows in cells.groupby(level=0, sort=False):
        for label, mean in baseline_means(runs_of(rows), split).items():
            by_label.setdefault(label, {})[x] = mean
    return by_label


# -------------------------------------------------------------------------------------------------------------- tables
def choices(rows: Mapping[str, Any], models: Collection[str]) -> list[str]:
    """Return our choices for `models` where the papers are silent, as lines.  `rows`: all models of a study."""
    lines = []
    for name, row in rows.items():
        if row.choice and name in models:
            lines.append(f"{row.label}: {row.choice}.")
    return lines


def settings_note(cells: Iterable[Cell]) -> str:
    """Return the selected settings as a line."""
    return f"Settings: {'; '.join(sorted(set(map(setting_text, cells))))}."


def setting_text(cell: Cell) -> str:
    """Return the selected learning rate, weight decay and warm-up, and the number of searched settings."""
    setting = cell.setting
    search = f"the best of {cell.tried} settings"
    if cell.tried == 1:
        search = "one setting, no search"
    return f"learning rate {setting.lr:g}, decay {setting.weight_decay:g}, warm-up {setting.warmup} ({search})"


# Title, split and metric (None: the task's own) of a column.
Column = tuple[str, str, str | None]


def score_row(cell: Cell, columns: Iterable[Column]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the scores of a cell by title of their columns, as text and as JSON values."""
    texts = {}
    values = {}
    for title, split, metric in columns:
        estimate = cell.score(split, metric)
        texts[title] = str(estimate)
        values[title] = estimate.as_json()
    return texts, values


def estimates(values: Mapping[tuple[Any, ...], Mapping[int, float]], names: Sequence[str]) -> Cells:
    """Return a series of estimates from values by seed; `names`: of the levels of its index."""
    import pandas

    index = pandas.MultiIndex.from_tuples(values, names=names)
    return pandas.Series(list(map(Estimate.of, values.values())), index=index, dtype=object)
