"""Tables A1 (ablations), A2 (ambiguity), A3 (the grid) and figure A9 (counts)."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from polyhead.analysis import figures
from polyhead.papers.hyla import claims
from polyhead.papers.hyla.claims import Estimate, Verdict
from polyhead.papers.hyla.rows import OURS, ROWS
from polyhead.papers.outcome import Outcome, both, drawn, floors, metric_name, numbers, runs_of, setting_text
from polyhead.papers.study import AXES, Cell, Study, label
from polyhead.tasks import Score, Sraven
from polyhead.tasks.sraven import counts as sraven_counts
from polyhead.tasks.sraven.ambiguity import ambiguity

TASKS = {"fuzzy": "fuzzy logic, R²", "sraven": "SRAVEN, accuracy"}


# ------------------------------------------------------------------------------------------------------------ Table A1
def table_a1(study: Study, folder: pathlib.Path) -> Outcome:
    """Compositional score of every model on both tasks, beside the paper's."""
    cells = {task: _models(study, task) for task in TASKS}
    cells = {task: found for task, found in cells.items() if found}
    levels = {task: floors(runs_of(found)) for task, found in cells.items()}
    pictures: list[tuple[str, str]] = []
    verdicts: list[Verdict] = []
    for task, found in cells.items():
        measured = {label(model): cell.score("compositional").values for model, cell in found.items()}
        lines = drawn(runs_of(found), levels[task])
        for path in both(f"table-a1-{task}", folder):
            values = {name: list(by_seed.values()) for name, by_seed in measured.items()}
            figures.results(values, path, floors=lines, metric=metric_name(task))
        caption = f"{TASKS[task]} on unseen combinations: means, standard errors and seeds of the selected settings."
        pictures.append((f"table-a1-{task}", caption))
        verdicts += claims.table_a1(task, {model: cell.score("compositional") for model, cell in found.items()})
    return Outcome(
        pictures=tuple(pictures),
        head=_a1_head(cells),
        rows=tuple(_a1_rows(cells, levels)),
        verdicts=tuple(verdicts),
        notes=tuple(_choices(cells)),
        numbers={task: {model: _numbers(cell, task) for model, cell in found.items()} for task, found in cells.items()},
    )


def _models(study: Study, task: str) -> dict[str, Cell]:
    found = {place[0]: cell for place, cell in study.cells("model", task=task).items()}
    return {model: found[model] for model in (ROWS | OURS) if model in found}


def _a1_head(cells: Mapping[str, Any]) -> tuple[str, ...]:
    head = ["model"]
    for task in cells:
        what = TASKS[task]
        head += [f"{what}: compositional", f"{what}: in distribution", f"{what}: paper", f"{what}: setting"]
    return tuple(head)


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
    scores = {split: numbers(cell.score(split)) for split in splits}
    return {"setting": vars(cell.setting), "tried": cell.tried, "validation": numbers(cell.validation), **scores}


# ------------------------------------------------------------------------------------------------------------ Table A3
def table_a3(study: Study, folder: pathlib.Path) -> Outcome:
    """Every setting that was searched: validation score, the one on unseen combinations, and which was selected."""
    rows, found = [], {}
    for task in TASKS:
        for (model,), cell in study.cells("model", task=task).items():
            mine = [p for p in study.points if AXES["model"](p.run) == model and AXES["task"](p.run) == task]
            for setting in dict.fromkeys(p.setting for p in mine):
                points = [p for p in mine if p.setting == setting]
                both_scores = [
                    Estimate.of({p.run.seed: p.score(split) for p in points})
                    for split in ("validation", "compositional")
                ]
                chosen = "selected" if setting == cell.setting else ""
                values = (f"{setting.lr:g}", f"{setting.weight_decay:g}", str(setting.warmup))
                rows.append((TASKS[task], label(model), *values, *map(str, both_scores), chosen))
                key = f"{task}, {model}, lr {setting.lr:g}, wd {setting.weight_decay:g}, warm-up {setting.warmup}"
                found[key] = {"validation": numbers(both_scores[0]), "compositional": numbers(both_scores[1])}
    head = ("task", "model", "lr", "weight decay", "warm-up", "validation", "compositional", "")
    note = "Selected by the mean validation score over seeds; the column beside it is not looked at for that."
    return Outcome(head=head, rows=tuple(rows), notes=(note,), numbers=found)


# ------------------------------------------------------------------------------------------------- Table A2, figure A9
def table_a2(scale: str, folder: pathlib.Path) -> Outcome:
    """Ambiguous instances by both definitions, and the Bayes-optimal accuracy."""
    count = {"smoke": 64}.get(scale, 4096)
    rows, found, verdicts = [], {}, []
    for (features, values), (paper, error) in claims.TABLE_A2.items():
        task = Sraven(features=features, values=values)
        measured = ambiguity(task, count)
        texts = [_share(measured[name]) for name in ("code", "text", "bayes")]
        rows.append((str(features), str(values), *texts[:2], f"{paper:.4f} ± {error:.4f}", texts[2]))
        found[f"M {features}, K {values}"] = {name: vars(score) for name, score in measured.items()}
        if (features, values) == (4, 8):
            named = {"code": "the code's definition (every feature differs)", "text": "the text's (any answer differs)"}
            verdicts = [claims.ambiguity(words, measured[n].mean, measured[n].count) for n, words in named.items()]
    head = ("M", "K", "ambiguous, the code's definition", "ambiguous, the text's", "paper", "Bayes-optimal accuracy")
    note = f"{count} instances of the training split, seed 0."
    return Outcome(head=head, rows=tuple(rows), verdicts=tuple(verdicts), notes=(note,), numbers=found)


def _share(score: Score) -> str:
    """A fraction; of none at all, what was looked at: a standard error of 0 would say too much."""
    none = f"0 of {score.count}"
    return none if score.mean == 0 else f"{score.mean:.4f} ± {score.standard_error:.4f}"


def fig_a9(scale: str, folder: pathlib.Path) -> Outcome:
    """Counts of tasks and instances by number of features, the paper's formula and the exact one."""
    features, sizes = range(2, 7), (4, 8, 16)
    tasks = {m: sraven_counts.tasks(m) for m in features}
    made = {(m, k): sraven_counts.instances(m, k) for m in features for k in sizes}
    by_name = {name: {m: [math.log10(getattr(tasks[m], name))] for m in features} for name in ("paper", "exact")}
    by_size = {
        f"K {k}, {name}": {m: [math.log10(getattr(made[m, k], name))] for m in features}
        for k in sizes
        for name in ("paper", "exact")
    }
    for path in both("fig-a9", folder):
        panels: list[Any] = [("A: tasks", by_name, {}), ("B: instances", by_size, {})]
        figures.lines(panels, path, x_label="features M", y_label="log10 of the count", columns=2)
    rows = [
        (
            str(m),
            f"{tasks[m].paper:,}",
            f"{tasks[m].exact:,}",
            *(f"{made[m, k].paper:.2e} / {made[m, k].exact:.2e}" for k in sizes),
        )
        for m in features
    ]
    head = ("M", "tasks, the paper's formula", "tasks, exact", *(f"instances K {k}, paper / exact" for k in sizes))
    found = {
        "tasks": {m: vars(c) for m, c in tasks.items()},
        "instances": {f"{m}, {k}": vars(c) for (m, k), c in made.items()},
    }
    note = "The paper's C(R + M - 1, M) ((M!)^(G-1) - M) is negative or zero for M = 1, which is left out."
    caption = (
        "Counts by number of features, on a logarithmic scale; M 1 is left out, for which the paper's formula gives 0."
    )
    return Outcome((("fig-a9", caption),), head, tuple(rows), notes=(note,), numbers=found)
