"""Fuzzy logic, scores by length of the context: Figures 2C and A3 of Schug et al. 2024."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from polyhead.analysis import figures
from polyhead.analysis.claims import Estimate, Scores, Verdict, above, mean
from polyhead.config import Run
from polyhead.papers import outcome
from polyhead.papers.hyla.rows import HYLA, label
from polyhead.papers.hyla.runs import FUZZY, FUZZY_GPU, fuzzy_task, three
from polyhead.papers.outcome import Cells, Figure, FigureOutcome, Picture, Rows, Table
from polyhead.papers.sizes import size
from polyhead.papers.study import TRAINING_LOSS, Study

# ---------------------------------------------------------------------------------------------------------------- runs
LENGTHS = {"paper": (16, 32, 64, 96), "short": (16, 32), "small": (16, 32), "smoke": (8, 16)}
HELD_OUT = {"paper": (0.3, 0.5, 0.7), "short": (0.5, 0.7), "small": (0.3, 0.5, 0.7), "smoke": (0.3, 0.7)}


def fig_2c(scale: str = "small") -> tuple[Run, ...]:
    """Fuzzy logic, compositional R² by context length and held-out fraction; Fig. A3 adds train, novel and loss.

    polyhead reproduce fig-2c.
    """
    shape = size(FUZZY, scale)
    runs: tuple[Run, ...] = ()
    for length, fraction in itertools.product(LENGTHS[scale], HELD_OUT[scale]):
        task = partial(fuzzy_task, scale, held_out=fraction, length=length)
        runs += three(scale, shape, task)
    return runs


# -------------------------------------------------------------------------------------------------------------- claims
ORDER = (("hyla", "softmax"), ("softmax", "linear"), ("hyla", "linear"))


def ordered(scores: Table, conditions: str) -> list[Verdict]:
    """Return the claim on the order of the three models, as means over the `conditions` of that name.

    The paper claims that HYLA is ahead of both.  That softmax is ahead of linear heads is read off its Table A1.
    """
    parts = {}
    for first, second in ORDER:
        by_condition = outcome.differences(scores, first, second)
        if by_condition.empty:
            return []
        parts[f"{label(first)} over {label(second)}"] = mean(by_condition)
    claim = f"HYLA is better on unseen combinations than softmax and that than linear, as the mean over {conditions}"
    return [above(claim, parts)]


def suffers_less(scores: Table) -> list[Verdict]:
    """Return the claim that HYLA loses less as more is held out.  `scores`: by length and fraction held out."""
    smallest, *_, largest = sorted(scores.index.unique("held out"))
    losses = scores.xs(smallest, level="held out") - scores.xs(largest, level="held out")
    if "hyla" not in losses:
        return []
    loss_of_hyla = mean(losses.pop("hyla"))
    parts = {}
    for model in sorted(losses):
        parts[f"loss of {label(model)} over HYLA's"] = mean(losses[model]) - loss_of_hyla
    claim = f"HYLA suffers less when {100 * largest:.0f} % are held out in place of {100 * smallest:.0f} %"
    return [above(claim, parts)]


def small_gaps(iid: Scores, compositional: Scores) -> list[Verdict]:
    """Return the claim that HYLA is less ahead in distribution than on unseen combinations."""
    if "hyla" not in iid or len(iid) == 1:
        return []
    parts = {}
    for model in sorted(set(iid.keys()) - {"hyla"}):
        outside = compositional["hyla"] - compositional[model]
        inside = iid["hyla"] - iid[model]
        parts[f"HYLA's lead over {label(model)}, unseen − known"] = outside - inside
    return [above("HYLA is less ahead on known combinations than on unseen ones", parts)]


def unknown_terms(condition: str, scores: Scores, baseline: Estimate) -> list[Verdict]:
    """Return the claim that all models are below a baseline without composition on unknown terms."""
    parts = {}
    for model, estimate in scores.items():
        parts[f"floor {baseline} − {label(model)}"] = baseline - estimate
    return [above(f"no model solves combinations of unknown terms: a Gaussian process is better ({condition})", parts)]


def is_comparable(cells: Cells) -> bool:
    """Return whether no cell is missing, and more than one fraction was held out."""
    return outcome.is_complete_grid(cells) and cells.index.unique("held out").size > 1


def claims_on_unseen(cells: Cells) -> list[Verdict]:
    """Return the claims about unseen combinations."""
    if not is_comparable(cells):
        return []
    scores = outcome.score_table(cells, "compositional")
    return ordered(scores, f"{len(scores)} settings") + suffers_less(scores)


def claims_on_gaps(cells: Cells) -> list[Verdict]:
    """Return the claim about gaps where most is held out; scores are means over the lengths."""
    if not is_comparable(cells):
        return []
    largest = max(cells.index.unique("held out"))
    at_largest = cells.xs(largest, level="held out")
    return small_gaps(
        outcome.score_table(at_largest, "iid").apply(mean), outcome.score_table(at_largest, "compositional").apply(mean)
    )


# ------------------------------------------------------------------------------------------------------------- drawing
TRAINING = (
    "Recall and mixture know no terms: the training functions, weighed by how well they fit the examples, and their "
    "best linear mixture. Every baseline is a mean over the splits of the seeds."
)


def draw_2c(study: Study) -> FigureOutcome:
    """Draw compositional R² by context length, a panel per held-out fraction."""
    cells = study.cells("length", "held out", "model")
    caption = (
        f"Compositional R² by tokens in the context, of which one is the query; {outcome.SEED_CAPTION}. {TRAINING}"
    )
    rows, numbers = table(cells, ("compositional",), setting_names)
    for row, (_, in_row) in zip(rows, cells.groupby(level=["length", "held out"]), strict=True):
        for name, estimate in outcome.drawn_baselines(outcome.runs_of(in_row)).items():
            row[name] = str(estimate)
    return FigureOutcome(
        pictures=[draw_by_length(cells, "compositional", "fig-2c", caption)],
        table=rows,
        verdicts=claims_on_unseen(cells),
        notes=[outcome.settings_note(cells)],
        numbers=numbers,
    )


def draw_a3(study: Study) -> FigureOutcome:
    """Draw Fig. A3.  A: compositional, B: training tasks, C: novel terms, D: training error."""
    cells = study.cells("length", "held out", "model")
    captions = {
        "compositional": f"A: R² on {study.split_name('compositional')}. {TRAINING}",
        "iid": f"B: R² on training tasks. {TRAINING}",
        "novel": f"C: R² on unknown terms. {TRAINING} Baselines below 0 everywhere in a panel are left out.",
        TRAINING_LOSS: "D: mean squared error on training batches, the last logged ones.",
    }
    pictures = []
    for letter, (split, caption) in zip("abcd", captions.items(), strict=True):
        pictures.append(draw_by_length(cells, split, f"fig-a3{letter}", caption))
    verdicts = claims_on_unseen(cells) + claims_on_gaps(cells)

    # Unknown terms at the longest context with the most held out.
    length, held_out = max(cells.droplevel("model").index)
    at_largest = cells[length, held_out]
    gaussian_process = outcome.baselines(outcome.runs_of(at_largest), "novel")["gaussian_process"]
    condition = f"{length} tokens, {100 * held_out:.0f} % held out"
    verdicts += unknown_terms(condition, outcome.scores_of(at_largest, "novel"), gaussian_process)
    rows, numbers = table(cells, tuple(captions), setting_names)
    return FigureOutcome(pictures, rows, verdicts, [outcome.settings_note(cells)], numbers)


def draw_by_length(cells: Cells, split: str, stem: str, caption: str) -> Picture:
    """Draw a panel per held-out fraction, with the context length on x and scores with their baselines."""
    is_loss = split == TRAINING_LOSS

    def levels(in_panel: Cells) -> dict[str, Any]:
        drawn: dict[str, Any] = {}
        if is_loss:
            return drawn
        for name, curve in outcome.baseline_curves(in_panel, split).items():
            if max(curve.values()) > 0:  # those below would flatten the curves
                drawn[name] = curve
        return drawn

    by_fraction = cells.swaplevel("length", "held out")
    panels = outcome.panels(by_fraction, split, label, lambda fraction: f"{100 * fraction:.0f} % held out", levels)
    limits: tuple[float | None, float | None] = (0.0, 1.02)
    y_label = "R²"
    if split in ("novel", TRAINING_LOSS):  # not from 0 to 1
        limits = (None, None)
    if is_loss:
        y_label = "training error"
    figure = figures.lines(panels, x_label="tokens in the context", y_label=y_label, log_x=True, limits=limits)
    return Picture(stem, caption, figure)


# -------------------------------------------------------------------------------------------------------------- tables
def setting_names(length: int, fraction: float) -> tuple[str, str]:
    """Return the name of a context length and a held-out fraction in the table and in the numbers."""
    return f"N {length}, {100 * fraction:.0f} % held out", f"N {length}, held out {fraction}"


def table(cells: Cells, splits: tuple[str, ...], names: Callable[..., tuple[str, str]] | None = None) -> Rows:
    """Return a row per condition with the scores of each model on `splits`.

    Args:
        names: Maps a condition to its name in the table and in the numbers; by default its axes and values.
    """
    axes = list(cells.index.names[:-1])
    rows = []
    numbers = {}
    for condition, in_row in cells.groupby(level=axes):
        text = key = ", ".join(map("{} {:g}".format, axes, condition))
        if names is not None:
            text, key = names(*condition)
        row = {"setting": text}
        values: dict[str, dict[str, Any]] = {}
        for split in splits:
            for model, estimate in outcome.scores_of(in_row.droplevel(axes), split).items():
                row[f"{label(model)}, {split}"] = str(estimate)
                values.setdefault(model, {})[split] = estimate.as_json()
        rows.append(row)
        numbers[key] = values
    return rows, numbers


_2C = "Fig. 2C: compositional generalisation on fuzzy logic"
FIGURES = {
    "fig-2c": Figure(_2C, HYLA, draw_2c, fig_2c, 42.3, FUZZY_GPU, short=True),
    "fig-a3": Figure("Fig. A3: fuzzy logic, all scores", HYLA, draw_a3, fig_2c, 42.3, FUZZY_GPU, short=True),
}
