"""Fuzzy logic, scores by length of the context: Figures 2C and A3 of Schug et al. 2024."""

import itertools
from collections.abc import Mapping
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
    settings_note,
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
    for length, held in itertools.product(LENGTHS[scale], HELD_OUT[scale]):
        task = partial(fuzzy_task, scale, held_out=held, length=length)
        runs += grid(task, THREE, shape, one_setting(shape, scale))
    return runs


# --------------------------------------------------------------------------------------------------------------- claims
ORDER = (("hyla", "softmax"), ("softmax", "linear"), ("hyla", "linear"))


def ordered(scores: Mapping[Any, Scores], what: str) -> list[Verdict]:
    """The claim of the paper's order of the three models; each difference is a mean over the places, seed by seed.

    `scores[place]`: scores by model.  `what`: the places, in words.
    """
    models = set.intersection(*(set(cell) for cell in scores.values()))
    parts = {
        f"{ROWS[a].label} over {ROWS[b].label}": mean([cell[a] - cell[b] for cell in scores.values()])
        for a, b in ORDER
        if {a, b} <= models
    }
    claim = f"HYLA is better on unseen combinations than softmax and that than linear, as the mean over {what}"
    return [above(claim, parts)] if len(parts) == len(ORDER) else []


def suffers_less(scores: Mapping[tuple[int, float], Scores]) -> list[Verdict]:
    """The claim that HYLA loses less as more is held out.  `scores[length, held_out]`: compositional R²."""
    lengths = sorted({length for length, _ in scores})
    few, many = min(h for _, h in scores), max(h for _, h in scores)
    models = sorted(set.intersection(*(set(cell) for cell in scores.values())))
    drop = {m: mean([scores[n, few][m] - scores[n, many][m] for n in lengths]) for m in models}
    claim = f"HYLA suffers less when {100 * many:.0f} % are held out in place of {100 * few:.0f} %"
    if "hyla" not in drop:
        return []
    others = {f"loss of {ROWS[m].label} over HYLA's": drop[m] - drop["hyla"] for m in models if m != "hyla"}
    return [above(claim, others)]


def small_gaps(iid: Scores, compositional: Scores) -> list[Verdict]:
    """The claim that models differ less in distribution than on unseen combinations."""
    parts = {}
    for name in sorted(set(iid) - {"hyla"}) if "hyla" in iid else ():
        outside, inside = compositional["hyla"] - compositional[name], iid["hyla"] - iid[name]
        parts[f"gap to {ROWS[name].label}, outside − inside"] = abs(outside) - abs(inside)
    claim = "in-distribution gaps between the models are smaller than those on unseen combinations"
    return [above(claim, parts)] if parts else []


def unknown_terms(where: str, scores: Scores, floor: Estimate) -> list[Verdict]:
    """The claim that all models are below a floor without composition on combinations of unknown terms, at `where`."""
    parts = {f"floor {floor} − {ROWS[m].label}": floor - e for m, e in scores.items()}
    claim = f"no model solves combinations of unknown terms: a Gaussian process is better ({where})"
    return [above(claim, parts)]


def _comparable(cells: Cells) -> bool:
    """Whether no cell is missing, and more than one fraction was held out."""
    return is_complete_grid(cells) and len({held for _, held in cells}) > 1


def _on_unseen(cells: Cells) -> list[Verdict]:
    """The claims about unseen combinations."""
    if not _comparable(cells):
        return []
    found = {place: scores_by_model(cell, "compositional") for place, cell in cells.items()}
    return ordered(found, f"{len(found)} settings") + suffers_less(found)


def _on_gaps(cells: Cells) -> list[Verdict]:
    """The claim about gaps where most is held out; scores are means over the lengths."""
    if not _comparable(cells):
        return []
    most = max(held for _, held in cells)
    there = [cell for (_, held), cell in cells.items() if held == most]

    def over_lengths(split: str) -> Scores:
        by_length = [scores_by_model(cell, split) for cell in there]
        return {model: mean([by[model] for by in by_length]) for model in there[0]}

    return small_gaps(over_lengths("iid"), over_lengths("compositional"))


# -------------------------------------------------------------------------------------------------------------- drawing
def draw_2c(study: Study) -> FigureOutcome:
    """Draw compositional R² by context length, a panel per held-out fraction."""
    cells = cells_by_model(study, "length", "held out")
    levels = {place: baselines(runs_of(cell)) for place, cell in cells.items()}
    caption = f"Compositional R² by tokens in the context, of which one is the query; {SEED_CAPTION}. {TRAINING}"
    table = _table(cells, levels, ("compositional",))
    picture = _picture(cells, "compositional", "fig-2c", caption)
    return replace(table, pictures=(picture,), verdicts=tuple(_on_unseen(cells)))


def draw_a3(study: Study) -> FigureOutcome:
    """Draw Fig. A3.  A: compositional, B: training tasks, C: novel terms, D: training error."""
    cells = cells_by_model(study, "length", "held out")
    pictures = []
    words = {"compositional": "unseen combinations", "iid": "training tasks", "novel": "unknown terms"}
    for letter, split in zip("abc", words, strict=True):
        caption = f"{letter.upper()}: R² on {words[split]}. {TRAINING}"
        if split == "novel":
            caption += " Baselines below 0 everywhere in a panel are left out."
        pictures.append(_picture(cells, split, f"fig-a3{letter}", caption))
    caption = "D: mean squared error on training batches, the last logged ones."
    pictures.append(_picture(cells, TRAINING_LOSS, "fig-a3d", caption))
    verdicts = _on_unseen(cells) + _on_gaps(cells)
    biggest = max(cells, default=None)
    if biggest is not None:
        beyond, levels = scores_by_model(cells[biggest], "novel"), baselines(runs_of(cells[biggest]), "novel")
        where = f"{biggest[0]} tokens, {100 * biggest[1]:.0f} % held out"
        verdicts += unknown_terms(where, beyond, levels["gaussian_process"])
    table = _table(cells, {}, ("compositional", "iid", "novel", TRAINING_LOSS))
    return replace(table, pictures=tuple(pictures), verdicts=tuple(verdicts))


def _picture(cells: Cells, split: str, stem: str, caption: str) -> Picture:
    """Draw a panel per held-out fraction, with the context length on x and scores with their baselines."""
    panels: list[Panel] = []
    for held in sorted({place[1] for place in cells}):
        mine = {place[0]: cell for place, cell in sorted(cells.items()) if place[1] == held}
        points = {
            n: {model: score_or_training_loss(cell, split) for model, cell in by.items()} for n, by in mine.items()
        }
        levels = {} if split == TRAINING_LOSS else baseline_curves(mine, split)
        levels = {name: by for name, by in levels.items() if max(by.values()) > 0}  # others would flatten the curves
        panels.append((f"{100 * held:.0f} % held out", score_curves(points, label), levels))
    limits = (None, None) if split in ("novel", TRAINING_LOSS) else (0.0, 1.02)
    y = "training error" if split == TRAINING_LOSS else "R²"
    figure = figures.lines(panels, x_label="tokens in the context", y_label=y, log_x=True, limits=limits)
    return Picture(stem, caption, figure)


def table(cells: Mapping[str, Mapping[str, Cell]], splits: tuple[str, ...]) -> FigureOutcome:
    """A table with a row per setting: the scores of each model on `splits`."""
    models = list(dict.fromkeys(model for by in cells.values() for model in by))
    rows = tuple(
        (name, *(str(score_or_training_loss(by[m], split)) if m in by else "–" for split in splits for m in models))
        for name, by in cells.items()
    )
    found = {
        name: {m: {split: score_or_training_loss(cell, split).as_json() for split in splits} for m, cell in by.items()}
        for name, by in cells.items()
    }
    head = ("setting", *(f"{label(m)}, {split}" for split in splits for m in models))
    note = settings_note(cell for by in cells.values() for cell in by.values())
    return FigureOutcome(head=head, rows=rows, numbers=found, notes=(note,))


def _table(cells: Cells, levels: Mapping[Coordinates, Baselines], splits: tuple[str, ...]) -> FigureOutcome:
    """The table with the drawn floors and the ceiling in its last columns."""
    places = sorted(cells)
    found = table({f"N {n}, held out {held}": cells[n, held] for n, held in places}, splits)
    common = baseline_labels((run for by in cells.values() for run in runs_of(by)), next(iter(levels.values()), {}))
    rows = tuple(
        (f"N {n}, {100 * held:.0f} % held out", *row[1:], *(str(levels[n, held][name]) for name in common))
        for (n, held), row in zip(places, found.rows, strict=True)
    )
    return replace(found, head=(*found.head, *common.values()), rows=rows)


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
