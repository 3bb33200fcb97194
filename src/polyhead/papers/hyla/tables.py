"""Tables A1 (ablations) and A3 (the grid of settings) of Schug et al. 2024."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.analysis import figures
from polyhead.config import Run
from polyhead.papers.claims import Estimate, Scores, Verdict, above
from polyhead.papers.figure import Figure
from polyhead.papers.hyla.rows import OURS, ROWS, label
from polyhead.papers.hyla.sizes import FUZZY, FUZZY_GPU, HYLA, SRAVEN, SRAVEN_GPU, THREE, fuzzy_task, grid, sraven_task
from polyhead.papers.outcome import Baselines, FigureOutcome, Picture, baseline_means, baselines, runs_of, setting_text
from polyhead.papers.sizes import size
from polyhead.papers.study import Cell, Study, over_seeds, select

TASKS = {"fuzzy": "fuzzy logic, R²", "sraven": "SRAVEN, accuracy"}
METRICS = {"fuzzy": "R²", "sraven": "accuracy"}
COLUMNS = ("compositional", "in distribution", "paper", "setting")
"""The columns of Table A1 for each task."""


def table_a1(scale: str = "small") -> tuple[Run, ...]:
    """Model ablations on both tasks: fourteen models and one of ours, the grid of settings, three seeds.

    polyhead reproduce table-a1.  Small: two rates.  Short: fuzzy logic, one rate.  Paper: warm-up 1000 on SRAVEN, as
    in the original ablation.

    Our choice where the paper is silent [the alternative]: the nonlinear value of linear attention is a ReLU on each
    head's values before the sum over keys [on each head's sum]; the deep value network has no bias in its second
    matrix [one per head]; HYLA + softmax takes the softmax over keys, then RMSHead [RMSHead first]; the mixture of
    experts has 4 experts of the MLP's width, 2 per token, load-balance loss 0.01, no gate noise [half the width].
    """
    rows = tuple(ROWS | OURS)
    fuzzy = grid(partial(fuzzy_task, scale), rows, size(FUZZY, scale))
    if scale == "short":
        return fuzzy
    sraven = size(SRAVEN, scale)
    return fuzzy + grid(partial(sraven_task, scale), rows, replace(sraven, warmups=sraven.warmups[:1]))


def table_a3(scale: str = "small") -> tuple[Run, ...]:
    """The grid search of Table A3, with warm-up, for the three models of the main text on both tasks.

    polyhead reproduce table-a3.  Short: fuzzy logic, the paper's rates and decays.
    """
    fuzzy = size(FUZZY, scale)
    if scale == "short":
        paper = FUZZY["paper"]
        return grid(partial(fuzzy_task, scale), THREE, replace(fuzzy, lrs=paper.lrs, decays=paper.decays))
    sraven = size(SRAVEN, scale)
    if scale != "paper":
        sraven = replace(sraven, warmups=(*sraven.warmups, 3 * sraven.warmups[0]))
    return (
        *grid(partial(fuzzy_task, scale), THREE, fuzzy),
        *grid(partial(sraven_task, scale), THREE, sraven),
    )


# --------------------------------------------------------------------------------------------------------------- claims
_A1: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("HYLA is better on unseen combinations than softmax and linear", (("hyla", "softmax"), ("hyla", "linear"))),
    ("the nonlinearity and RMSHead are both needed", (("hyla", "hyla-linear"), ("hyla", "hyla-norms"))),
    ("RMSHead alone helps linear attention", (("linear-rms", "linear"),)),
    ("a softmax in place of RMSHead is worse", (("hyla", "hyla-softmax"),)),
    ("a deeper value network is strong too: better than softmax", (("hyla-deep", "softmax"),)),
    (
        "mixture of experts helps each kind of heads",
        (("softmax-moe", "softmax"), ("linear-moe", "linear"), ("hyla-moe", "hyla")),
    ),
)  # fmt: skip


def ablations(task: str, measured: Scores) -> list[Verdict]:
    """Return the claims about Table A1 on `task` ("fuzzy" or "sraven"), without claims whose models were not run."""
    verdicts = []
    for claim, pairs in _A1:
        parts = {}
        paper = {}
        for first, second in pairs:
            if first in measured and second in measured:
                name = f"{ROWS[first].label} over {ROWS[second].label}"
                parts[name] = measured[first] - measured[second]
                paper[name] = printed(task, first) - printed(task, second)
        if len(parts) == len(pairs):
            verdicts.append(above(f"{claim} ({task})", parts, printed=paper))
    return verdicts


def printed(task: str, name: str) -> Estimate:
    """Return the paper's number for a model of Table A1, as a fraction."""
    value = getattr(ROWS[name], task)
    assert value is not None
    return Estimate.printed(value[0] / 100, value[1] / 100)


# -------------------------------------------------------------------------------------------------------------- drawing
def draw_a1(study: Study) -> FigureOutcome:
    """Draw the compositional score of every model on both tasks beside the paper's."""
    cells_of_task: dict[str, dict[str, Cell]] = {}
    for task in TASKS:
        cells = {model: cell for (model,), cell in study.cells("model", task=task).items()}
        if cells:
            cells_of_task[task] = {model: cells[model] for model in (ROWS | OURS) if model in cells}
    estimates = {task: baselines(runs_of(cells)) for task, cells in cells_of_task.items()}
    pictures: list[Picture] = []
    verdicts: list[Verdict] = []
    head = ["model"]
    for task, cells in cells_of_task.items():
        scores = {model: cell.score("compositional") for model, cell in cells.items()}
        by_label = {label(model): list(score.values.values()) for model, score in scores.items()}
        levels = baseline_means(runs_of(cells), estimates[task])
        figure = figures.results(by_label, baselines=levels, metric=METRICS[task])
        caption = f"{TASKS[task]} on unseen combinations: means, standard errors and seeds of the selected settings."
        pictures.append(Picture(f"table-a1-{task}", caption, figure))
        verdicts += ablations(task, scores)
        head += [f"{TASKS[task]}: {column}" for column in COLUMNS]
    return FigureOutcome(
        pictures=tuple(pictures),
        head=tuple(head),
        rows=tuple(rows_of_a1(cells_of_task, estimates)),
        verdicts=tuple(verdicts),
        notes=tuple(choices_of_a1(cells_of_task)),
        numbers=numbers_of_a1(cells_of_task),
    )


def rows_of_a1(
    cells_of_task: Mapping[str, Mapping[str, Cell]], estimates: Mapping[str, Baselines]
) -> list[tuple[str, ...]]:
    """Return a row for each model that was run, then for each baseline."""
    rows = []
    for model, table_row in (ROWS | OURS).items():
        if not any(model in cells for cells in cells_of_task.values()):
            continue
        texts = [table_row.label]
        for task, cells in cells_of_task.items():
            paper = getattr(table_row, task)
            paper_text = "–" if paper is None else f"{paper[0] / 100:.3f} ± {paper[1] / 100:.3f}"
            if model in cells:
                cell = cells[model]
                texts += [str(cell.score("compositional")), str(cell.score("iid")), paper_text, setting_text(cell)]
            else:
                texts += ["–", "–", paper_text, "–"]
        rows.append(tuple(texts))
    names: dict[str, None] = {}
    for by_name in estimates.values():
        names |= dict.fromkeys(by_name)
    for name in names:
        texts = [name.replace("_", " ")]
        for task in cells_of_task:
            texts += [str(estimates[task].get(name, "–")), "–", "–", "–"]
        rows.append(tuple(texts))
    return rows


def choices_of_a1(cells_of_task: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    """Return our choices where the paper is silent, for the models that were run."""
    notes = []
    for model, row in (ROWS | OURS).items():
        if row.choice and any(model in cells for cells in cells_of_task.values()):
            notes.append(f"{row.label}: {row.choice}.")
    return notes


def numbers_of_a1(cells_of_task: Mapping[str, Mapping[str, Cell]]) -> dict[str, dict[str, Any]]:
    """Return the setting and all scores of every model as JSON values."""
    numbers: dict[str, dict[str, Any]] = {}
    for task, cells in cells_of_task.items():
        numbers[task] = {}
        for model, cell in cells.items():
            values = {"setting": vars(cell.setting), "tried": cell.tried, "validation": cell.validation.as_json()}
            for split in cell.points[0].result.scores:
                if split != "validation":
                    values[split] = cell.score(split).as_json()
            numbers[task][model] = values
    return numbers


def draw_a3(study: Study) -> FigureOutcome:
    """Draw all searched settings: validation score, score on unseen combinations, and the selected setting."""
    rows = []
    numbers = {}
    for task in TASKS:
        for (model,), by_setting in study.searched("model", task=task).items():
            selected = select(by_setting).setting
            for setting, points in by_setting.items():
                validation = over_seeds(points, "validation")
                unseen = over_seeds(points, "compositional")
                values = (f"{setting.lr:g}", f"{setting.weight_decay:g}", str(setting.warmup))
                mark = "selected" if setting == selected else ""
                rows.append((TASKS[task], label(model), *values, str(validation), str(unseen), mark))
                name = f"{task}, {model}, lr {setting.lr:g}, wd {setting.weight_decay:g}, warm-up {setting.warmup}"
                numbers[name] = {"validation": validation.as_json(), "compositional": unseen.as_json()}
    head = ("task", "model", "lr", "weight decay", "warm-up", "validation", "compositional", "")
    note = "Selected by the mean validation score over seeds; the column beside it is not looked at for that."
    return FigureOutcome(head=head, rows=tuple(rows), notes=(note,), numbers=numbers)


BOTH_GPU = f"{FUZZY_GPU}, {SRAVEN_GPU}"
FIGURES = {
    "table-a1": Figure("Table A1: model ablations", HYLA, draw_a1, table_a1, 185.6, BOTH_GPU, short=True),
    "table-a3": Figure("Table A3: the grid of settings", HYLA, draw_a3, table_a3, 38.0, BOTH_GPU, short=True),
}
