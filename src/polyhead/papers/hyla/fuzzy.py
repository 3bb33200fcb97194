"""Fuzzy logic, scores by length of the context: Figures 2C and A3 of Schug et al. 2024."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.analysis import figures
from polyhead.config import Run
from polyhead.papers.claims import Estimate, Scores, Verdict, above, mean
from polyhead.papers.figure import Figure
from polyhead.papers.hyla.rows import ROWS, label
from polyhead.papers.hyla.sizes import FUZZY, FUZZY_GPU, HYLA, THREE, fuzzy_task, grid
from polyhead.papers.outcome import (
    SEED_CAPTION,
    Baselines,
    Cells,
    FigureOutcome,
    Panel,
    Picture,
    baseline_curves,
    baseline_labels,
    baselines,
    cells_by_model,
    is_complete_grid,
    runs_of,
    score_curves,
    score_or_training_loss,
    scores_by_model,
    settings_of,
)
from polyhead.papers.sizes import one_setting, size
from polyhead.papers.study import TRAINING_LOSS, Cell, Coordinates, Study

LENGTHS = {"paper": (16, 32, 64, 96), "short": (16, 32), "small": (16, 32), "smoke": (8, 16)}
HELD_OUT = {"paper": (0.3, 0.5, 0.7), "short": (0.5, 0.7), "small": (0.3, 0.5, 0.7), "smoke": (0.3, 0.7)}
TRAINING = (
    "Recall and mixture know no terms: the training functions, weighed by how well they fit the examples, and their "
    "best linear mixture. Every baseline is a mean over the splits of the seeds."
)


def fig_2c(scale: str = "small") -> tuple[Run, ...]:
    """Fuzzy logic, compositional R² by context length and held-out fraction; Fig. A3 adds train, novel and loss.

    polyhead reproduce fig-2c.  Small: contexts of 16 and 32 tokens (without 64 and 96), only rate 5e-3.  Short: the
    same contexts, 50 and 70 % held out, only rate 1e-3.
    """
    shape = size(FUZZY, scale)
    runs: tuple[Run, ...] = ()
    for length, fraction in itertools.product(LENGTHS[scale], HELD_OUT[scale]):
        task = partial(fuzzy_task, scale, held_out=fraction, length=length)
        runs += grid(task, THREE, shape, one_setting(shape, scale))
    return runs


# --------------------------------------------------------------------------------------------------------------- claims
ORDER = (("hyla", "softmax"), ("softmax", "linear"), ("hyla", "linear"))


def ordered(scores: Mapping[Any, Scores], what: str) -> list[Verdict]:
    """Return the claim of the paper's order of the three models; each difference is a mean over the places.

    `scores[place]`: scores by model.  `what`: the places, in words.  No claim if a model was not run everywhere.
    """
    parts = {}
    for first, second in ORDER:
        if not all({first, second} <= set(by_model) for by_model in scores.values()):
            return []
        differences = [by_model[first] - by_model[second] for by_model in scores.values()]
        parts[f"{ROWS[first].label} over {ROWS[second].label}"] = mean(differences)
    claim = f"HYLA is better on unseen combinations than softmax and that than linear, as the mean over {what}"
    return [above(claim, parts)]


def suffers_less(scores: Mapping[tuple[int, float], Scores]) -> list[Verdict]:
    """Return the claim that HYLA loses less as more is held out.  `scores[length, held_out]`: compositional R²."""
    lengths = axis_values(scores, 0)
    smallest, *_, largest = axis_values(scores, 1)
    losses: dict[str, Estimate] = {}
    for model in sorted(common_models(scores)):
        by_length = [scores[length, smallest][model] - scores[length, largest][model] for length in lengths]
        losses[model] = mean(by_length)
    if "hyla" not in losses:
        return []
    hyla = losses.pop("hyla")
    parts = {f"loss of {ROWS[model].label} over HYLA's": loss - hyla for model, loss in losses.items()}
    claim = f"HYLA suffers less when {100 * largest:.0f} % are held out in place of {100 * smallest:.0f} %"
    return [above(claim, parts)]


def small_gaps(iid: Scores, compositional: Scores) -> list[Verdict]:
    """Return the claim that models differ less in distribution than on unseen combinations."""
    if "hyla" not in iid or len(iid) == 1:
        return []
    parts = {}
    for name in sorted(set(iid) - {"hyla"}):
        outside = compositional["hyla"] - compositional[name]
        inside = iid["hyla"] - iid[name]
        parts[f"gap to {ROWS[name].label}, outside − inside"] = abs(outside) - abs(inside)
    return [above("in-distribution gaps between the models are smaller than those on unseen combinations", parts)]


def unknown_terms(where: str, scores: Scores, baseline: Estimate) -> list[Verdict]:
    """Return the claim that all models are below a baseline without composition on unknown terms, at `where`."""
    parts = {f"floor {baseline} − {ROWS[model].label}": baseline - score for model, score in scores.items()}
    return [above(f"no model solves combinations of unknown terms: a Gaussian process is better ({where})", parts)]


def axis_values(table: Iterable[tuple[Any, ...]], axis: int) -> list[Any]:
    """Return the sorted values of the places of a table on one of its axes."""
    return sorted({condition[axis] for condition in table})


def common_models(scores: Mapping[Any, Scores]) -> set[str]:
    """Return the models that have a score at every place."""
    return set.intersection(*(set(by_model) for by_model in scores.values()))


def is_comparable(cells: Cells) -> bool:
    """Return whether no cell is missing, and more than one fraction was held out."""
    return is_complete_grid(cells) and len(axis_values(cells, 1)) > 1


def claims_on_unseen(cells: Cells) -> list[Verdict]:
    """Return the claims about unseen combinations."""
    if not is_comparable(cells):
        return []
    scores = {condition: scores_by_model(cell, "compositional") for condition, cell in cells.items()}
    return ordered(scores, f"{len(scores)} settings") + suffers_less(scores)


def claims_on_gaps(cells: Cells) -> list[Verdict]:
    """Return the claim about gaps where most is held out; scores are means over the lengths."""
    if not is_comparable(cells):
        return []
    largest = axis_values(cells, 1)[-1]
    means: dict[str, dict[str, Estimate]] = {}
    for split in ("iid", "compositional"):
        by_length = [scores_by_model(cells[condition], split) for condition in cells if condition[1] == largest]
        means[split] = {model: mean([scores[model] for scores in by_length]) for model in by_length[0]}
    return small_gaps(means["iid"], means["compositional"])


# -------------------------------------------------------------------------------------------------------------- drawing
def draw_2c(study: Study) -> FigureOutcome:
    """Draw compositional R² by context length, a panel per held-out fraction."""
    cells = cells_by_model(study, "length", "held out")
    estimates = {condition: baselines(runs_of(cell)) for condition, cell in cells.items()}
    caption = f"Compositional R² by tokens in the context, of which one is the query; {SEED_CAPTION}. {TRAINING}"
    picture = draw_by_length(cells, "compositional", "fig-2c", caption)
    outcome = table_with_baselines(cells, estimates, ("compositional",))
    return replace(outcome, pictures=(picture,), verdicts=tuple(claims_on_unseen(cells)))


def draw_a3(study: Study) -> FigureOutcome:
    """Draw Fig. A3.  A: compositional, B: training tasks, C: novel terms, D: training error."""
    cells = cells_by_model(study, "length", "held out")
    pictures = []
    words = {"compositional": "unseen combinations", "iid": "training tasks", "novel": "unknown terms"}
    for letter, split in zip("abc", words, strict=True):
        caption = f"{letter.upper()}: R² on {words[split]}. {TRAINING}"
        if split == "novel":
            caption += " Baselines below 0 everywhere in a panel are left out."
        pictures.append(draw_by_length(cells, split, f"fig-a3{letter}", caption))
    caption = "D: mean squared error on training batches, the last logged ones."
    pictures.append(draw_by_length(cells, TRAINING_LOSS, "fig-a3d", caption))

    verdicts = claims_on_unseen(cells) + claims_on_gaps(cells)
    if cells:
        length, held_out = largest = max(cells)
        estimates = baselines(runs_of(cells[largest]), "novel")
        where = f"{length} tokens, {100 * held_out:.0f} % held out"
        verdicts += unknown_terms(where, scores_by_model(cells[largest], "novel"), estimates["gaussian_process"])
    outcome = table_with_baselines(cells, {}, ("compositional", "iid", "novel", TRAINING_LOSS))
    return replace(outcome, pictures=tuple(pictures), verdicts=tuple(verdicts))


def draw_by_length(cells: Cells, split: str, stem: str, caption: str) -> Picture:
    """Draw a panel per held-out fraction, with the context length on x and scores with their baselines."""
    panels: list[Panel] = []
    for held_out in axis_values(cells, 1):
        by_length = {length: cells[length, held_out] for length, fraction in sorted(cells) if fraction == held_out}
        points: dict[int, dict[str, Estimate]] = {}
        for length, by_model in by_length.items():
            points[length] = {model: score_or_training_loss(cell, split) for model, cell in by_model.items()}
        curves = {}
        if split != TRAINING_LOSS:
            for name, curve in baseline_curves(by_length, split).items():
                if max(curve.values()) > 0:  # others would flatten the curves
                    curves[name] = curve
        panels.append((f"{100 * held_out:.0f} % held out", score_curves(points, label), curves))
    limits = (None, None) if split in ("novel", TRAINING_LOSS) else (0.0, 1.02)
    y_label = "training error" if split == TRAINING_LOSS else "R²"
    figure = figures.lines(panels, x_label="tokens in the context", y_label=y_label, log_x=True, limits=limits)
    return Picture(stem, caption, figure)


def table(cells: Mapping[str, Mapping[str, Cell]], splits: tuple[str, ...]) -> FigureOutcome:
    """Return a table with a row per setting: the scores of each model on `splits`."""
    models: dict[str, None] = {}
    for by_model in cells.values():
        models |= dict.fromkeys(by_model)
    columns = list(itertools.product(splits, models))
    rows = []
    numbers: dict[str, dict[str, dict[str, Any]]] = {}
    for name, by_model in cells.items():
        row = [name]
        for split, model in columns:
            if model in by_model:
                score = score_or_training_loss(by_model[model], split)
                row.append(str(score))
                numbers.setdefault(name, {}).setdefault(model, {})[split] = score.as_json()
            else:
                row.append("–")
        rows.append(tuple(row))
    head = ("setting", *(f"{label(model)}, {split}" for split, model in columns))
    return FigureOutcome(head=head, rows=tuple(rows), numbers=numbers, notes=(settings_of(cells),))


def table_with_baselines(
    cells: Cells, estimates: Mapping[Coordinates, Baselines], splits: tuple[str, ...]
) -> FigureOutcome:
    """Return the table with the drawn baselines and the ceiling in its last columns."""
    places = sorted(cells)
    outcome = table(
        {f"N {length}, held out {fraction}": cells[length, fraction] for length, fraction in places}, splits
    )
    labels: dict[str, str] = {}
    if estimates:
        runs = [run for by_model in cells.values() for run in runs_of(by_model)]
        labels = baseline_labels(runs, next(iter(estimates.values())))
    rows = []
    for (length, fraction), row in zip(places, outcome.rows, strict=True):
        texts = [str(estimates[length, fraction][name]) for name in labels]
        rows.append((f"N {length}, {100 * fraction:.0f} % held out", *row[1:], *texts))
    return replace(outcome, head=(*outcome.head, *labels.values()), rows=tuple(rows))


FIGURES = {
    "fig-2c": Figure(
        "Fig. 2C: compositional generalisation on fuzzy logic",
        HYLA,
        draw_2c,
        fig_2c,
        minutes=42.3,
        gpu=FUZZY_GPU,
        short=True,
    ),
    "fig-a3": Figure(
        "Fig. A3: fuzzy logic, all scores", HYLA, draw_a3, fig_2c, minutes=42.3, gpu=FUZZY_GPU, short=True
    ),
}
