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
from polyhead.papers.outcome import FigureOutcome, Picture, baseline_means, baselines, runs_of, setting_text
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
    """The claims about Table A1 on `task` ("fuzzy" or "sraven"), without claims whose models were not run."""
    verdicts = []
    for claim, pairs in _A1:
        if not all(name in measured for pair in pairs for name in pair):
            continue
        parts = {f"{ROWS[a].label} over {ROWS[b].label}": measured[a] - measured[b] for a, b in pairs}
        own = {f"{ROWS[a].label} over {ROWS[b].label}": printed(task, a) - printed(task, b) for a, b in pairs}
        verdicts.append(above(f"{claim} ({task})", parts, printed=own))
    return verdicts


def printed(task: str, name: str) -> Estimate:
    """The paper's number for a model of Table A1, as a fraction."""
    value = getattr(ROWS[name], task)
    assert value is not None
    return Estimate.printed(value[0] / 100, value[1] / 100)


# -------------------------------------------------------------------------------------------------------------- drawing
def draw_a1(study: Study) -> FigureOutcome:
    """Draw the compositional score of every model on both tasks beside the paper's."""
    cells = {task: _models(study, task) for task in TASKS}
    cells = {task: found for task, found in cells.items() if found}
    levels = {task: baselines(runs_of(found)) for task, found in cells.items()}
    pictures: list[Picture] = []
    verdicts: list[Verdict] = []
    for task, found in cells.items():
        measured = {label(model): cell.score("compositional").values for model, cell in found.items()}
        lines = baseline_means(runs_of(found), levels[task])
        values = {name: list(by_seed.values()) for name, by_seed in measured.items()}
        figure = figures.results(values, baselines=lines, metric=METRICS[task])
        caption = f"{TASKS[task]} on unseen combinations: means, standard errors and seeds of the selected settings."
        pictures.append(Picture(f"table-a1-{task}", caption, figure))
        verdicts += ablations(task, {model: cell.score("compositional") for model, cell in found.items()})
    return FigureOutcome(
        pictures=tuple(pictures),
        head=("model", *(f"{TASKS[task]}: {column}" for task in cells for column in COLUMNS)),
        rows=tuple(_a1_rows(cells, levels)),
        verdicts=tuple(verdicts),
        notes=tuple(_choices(cells)),
        numbers={task: {model: _numbers(cell, task) for model, cell in found.items()} for task, found in cells.items()},
    )


def _models(study: Study, task: str) -> dict[str, Cell]:
    found = {place[0]: cell for place, cell in study.cells("model", task=task).items()}
    return {model: found[model] for model in (ROWS | OURS) if model in found}


def _a1_rows(cells: Mapping[str, Mapping[str, Cell]], levels: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for model, row in (ROWS | OURS).items():
        if not any(model in found for found in cells.values()):
            continue
        line = [row.label]
        for task, found in cells.items():
            cell, own = found.get(model), getattr(row, task)
            line += ["–", "–"] if cell is None else [str(cell.score(split)) for split in ("compositional", "iid")]
            line.append("–" if own is None else f"{own[0] / 100:.3f} ± {own[1] / 100:.3f}")
            line.append("–" if cell is None else setting_text(cell))
        rows.append(tuple(line))
    for name in dict.fromkeys(name for found in levels.values() for name in found):
        line = [name.replace("_", " ")]
        for task in cells:
            line += [str(levels[task][name]) if name in levels[task] else "–", "–", "–", "–"]
        rows.append(tuple(line))
    return rows


def _choices(cells: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    ran = {model for found in cells.values() for model in found}
    return [f"{row.label}: {row.choice}." for model, row in (ROWS | OURS).items() if row.choice and model in ran]


def _numbers(cell: Cell, task: str) -> dict[str, Any]:
    splits = [split for split in cell.points[0].result.scores if split != "validation"]
    scores = {split: cell.score(split).as_json() for split in splits}
    return {"setting": vars(cell.setting), "tried": cell.tried, "validation": cell.validation.as_json(), **scores}


def draw_a3(study: Study) -> FigureOutcome:
    """Draw all searched settings: validation score, score on unseen combinations, and the selected setting."""
    rows, found = [], {}
    for task in TASKS:
        for (model,), by_setting in study.searched("model", task=task).items():
            selected = select(by_setting).setting
            for setting, points in by_setting.items():
                scores = {split: over_seeds(points, split) for split in ("validation", "compositional")}
                values = (f"{setting.lr:g}", f"{setting.weight_decay:g}", str(setting.warmup))
                chosen = "selected" if setting == selected else ""
                rows.append((TASKS[task], label(model), *values, *map(str, scores.values()), chosen))
                key = f"{task}, {model}, lr {setting.lr:g}, wd {setting.weight_decay:g}, warm-up {setting.warmup}"
                found[key] = {split: score.as_json() for split, score in scores.items()}
    head = ("task", "model", "lr", "weight decay", "warm-up", "validation", "compositional", "")
    note = "Selected by the mean validation score over seeds; the column beside it is not looked at for that."
    return FigureOutcome(head=head, rows=tuple(rows), notes=(note,), numbers=found)


BOTH_GPU = f"{FUZZY_GPU}, {SRAVEN_GPU}"
FIGURES = {
    "table-a1": Figure("Table A1: model ablations", HYLA, draw_a1, table_a1, 185.6, BOTH_GPU, short=True),
    "table-a3": Figure("Table A3: the grid of settings", HYLA, draw_a3, table_a3, 38.0, BOTH_GPU, short=True),
}
