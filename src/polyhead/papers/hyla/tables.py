"""Tables A1 (ablations) and A3 (the grid of settings) of Schug et al. 2024."""

from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.analysis import figures
from polyhead.analysis.claims import Scores, Verdict, above
from polyhead.config import Run
from polyhead.papers import outcome
from polyhead.papers.hyla.rows import HYLA, OURS, ROWS, label
from polyhead.papers.hyla.runs import FUZZY, FUZZY_GPU, SRAVEN, SRAVEN_GPU, THREE, fuzzy_task, grid, sraven_task
from polyhead.papers.outcome import Figure, FigureOutcome, Picture
from polyhead.papers.sizes import size
from polyhead.papers.study import Study, over_seeds, select


# ---------------------------------------------------------------------------------------------------------------- runs
def table_a1(scale: str = "small") -> tuple[Run, ...]:
    """Model ablations on both tasks: fourteen models and one of ours, the grid of settings, three seeds.

    polyhead reproduce table-a1.  Small: two rates.  Short: fuzzy logic, one rate.  Paper: warm-up 1000 on SRAVEN, as
    in the original ablation.
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
    return grid(partial(fuzzy_task, scale), THREE, fuzzy) + grid(partial(sraven_task, scale), THREE, sraven)


# -------------------------------------------------------------------------------------------------------------- claims
MOE_PAIRS = (("softmax-moe", "softmax"), ("linear-moe", "linear"), ("hyla-moe", "hyla"))
# Claim -> the pairs of models of which the first is better.
A1_CLAIMS = {
    "HYLA is better on unseen combinations than softmax and linear": (("hyla", "softmax"), ("hyla", "linear")),
    "the nonlinearity and RMSHead are both needed": (("hyla", "hyla-linear"), ("hyla", "hyla-norms")),
    "RMSHead alone helps linear attention": (("linear-rms", "linear"),),
    "a softmax in place of RMSHead is worse": (("hyla", "hyla-softmax"),),
    "a deeper value network is strong too: better than softmax": (("hyla-deep", "softmax"),),
    "mixture of experts helps each kind of heads": MOE_PAIRS,
}


def ablations(task: str, scores: Scores) -> list[Verdict]:
    """Return the claims about Table A1 on `task` ("fuzzy" or "sraven"), without claims whose models were not run."""
    verdicts = []
    for claim, pairs in A1_CLAIMS.items():
        parts = {}
        for first, second in pairs:
            if first in scores and second in scores:
                parts[f"{label(first)} over {label(second)}"] = scores[first] - scores[second]
        if len(parts) == len(pairs):
            verdicts.append(above(f"{claim} ({task})", parts))
    return verdicts


# ------------------------------------------------------------------------------------------------------------- drawing
TASKS = {"fuzzy": ("fuzzy logic", "R²"), "sraven": ("SRAVEN", "accuracy")}


def draw_a1(study: Study) -> FigureOutcome:
    """Draw the compositional score of every model on both tasks beside the paper's."""
    models = ROWS | OURS
    rows: dict[str, dict[str, str]] = {}  # by model or baseline
    for model in models:
        rows[model] = {"model": label(model)}
    pictures = []
    verdicts = []
    numbers: dict[str, dict[str, Any]] = {}
    for task, (name, metric) in TASKS.items():
        cells = study.cells("model", task=task)
        if cells.empty:
            continue
        cells = cells.reindex([model for model in models if model in cells])
        runs = outcome.runs_of(cells)
        scores = outcome.scores_of(cells, "compositional")
        column, unseen = f"{name}, {metric}", runs[0].task.split_name("compositional")
        figure = figures.results(
            {label(model): estimate.by_seed for model, estimate in scores.items()},
            baselines=outcome.baseline_means(runs),
            score=f"{metric} on {unseen}",
        )
        caption = f"{column} on {unseen}: means, standard errors and seeds of the selected settings."
        pictures.append(Picture(f"table-a1-{task}", caption, figure))
        verdicts += ablations(task, scores)

        numbers[task] = {}
        for model, cell in cells.items():
            rows[model] |= {
                f"{column}: compositional": str(scores[model]),
                f"{column}: in distribution": str(cell.score("iid")),
                f"{column}: paper": models[model].printed(task),
                f"{column}: setting": outcome.setting_text(cell),
            }
            values = {"setting": vars(cell.setting), "tried": cell.tried, "validation": cell.validation.as_json()}
            for split in cell.points[0].result.scores:
                if split != "validation":
                    values[split] = cell.score(split).as_json()
            numbers[task][model] = values
        for baseline, estimate in outcome.baselines(runs).items():
            row = rows.setdefault(baseline, {"model": baseline.replace("_", " ")})
            row[f"{column}: compositional"] = str(estimate)

    trained = {name: row for name, row in rows.items() if len(row) > 1}  # it has scores beside its name
    notes = outcome.choices(models, trained)
    return FigureOutcome(pictures, list(trained.values()), verdicts, notes, numbers)


def draw_a3(study: Study) -> FigureOutcome:
    """Draw all searched settings: validation score, score on unseen combinations, and the selected setting."""
    rows = []
    numbers = {}
    for task, (name, metric) in TASKS.items():
        for (model,), by_setting in study.searched("model", task=task).items():
            selected = select(by_setting).setting
            for setting, points in by_setting.items():
                validation = over_seeds(points, "validation")
                unseen = over_seeds(points, "compositional")
                row = {
                    "task": f"{name}, {metric}",
                    "model": label(model),
                    "lr": f"{setting.lr:g}",
                    "weight decay": f"{setting.weight_decay:g}",
                    "warm-up": str(setting.warmup),
                    "validation": str(validation),
                    "compositional": str(unseen),
                    "": "",
                }
                if setting == selected:
                    row[""] = "selected"
                rows.append(row)
                key = f"{task}, {model}, lr {setting.lr:g}, wd {setting.weight_decay:g}, warm-up {setting.warmup}"
                numbers[key] = {"validation": validation.as_json(), "compositional": unseen.as_json()}
    note = "Selected by the mean validation score over seeds; the column beside it is not looked at for that."
    return FigureOutcome(table=rows, notes=[note], numbers=numbers)


BOTH_GPU = f"{FUZZY_GPU}, {SRAVEN_GPU}"
FIGURES = {
    "table-a1": Figure("Table A1: model ablations", HYLA, draw_a1, table_a1, 185.6, BOTH_GPU, short=True),
    "table-a3": Figure("Table A3: the grid of settings", HYLA, draw_a3, table_a3, 38.0, BOTH_GPU, short=True),
}
