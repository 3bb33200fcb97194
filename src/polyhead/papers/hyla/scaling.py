"""SRAVEN, scores along one axis: Figures 4A, 4B and A4 (data and size), 5C (heads), 5D (features), A5 (held out)."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.analysis import figures
from polyhead.analysis.claims import Verdict, above
from polyhead.config import Run
from polyhead.papers import outcome
from polyhead.papers.hyla.fuzzy import ordered, table
from polyhead.papers.hyla.rows import HYLA, label
from polyhead.papers.hyla.runs import SRAVEN, SRAVEN_GPU, sraven_task, three
from polyhead.papers.outcome import Draw, Figure, FigureOutcome, Picture, Table
from polyhead.papers.sizes import Scale, size, widened, with_seeds
from polyhead.papers.study import TRAINING_LOSS, Study

# ---------------------------------------------------------------------------------------------------------------- runs
DATA = {"paper": (0.5, 1.0, 2.0), "small": (0.5, 1.0, 2.0), "smoke": (0.5, 1.0)}
WIDTHS = {"paper": (1.0, 2.0, 4.0), "small": (0.5, 1.0, 2.0), "smoke": (1.0, 2.0)}
DEPTHS = {"paper": (4, 8, 16), "small": (1, 2, 4), "smoke": (1, 2)}
HEADS = {"paper": (1, 2, 4, 8, 16), "small": (1, 2, 4, 8), "smoke": (1, 2)}
FEATURES = {"paper": (2, 3, 4), "small": (2, 3), "smoke": (2, 3)}
FRACTIONS = {"paper": (0.1, 0.25, 0.5, 0.75), "small": (0.1, 0.25, 0.5, 0.75), "smoke": (0.25, 0.5)}


def fig_4a(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by training instances and width, with a constant number of heads as in the text.

    polyhead reproduce fig-4a (and fig-a4 for the loss).  Small: one rate, one seed less.
    """
    base = _base(scale)
    return _by_data(scale, [widened(base, factor) for factor in WIDTHS[scale]])


def fig_4a_heads(scale: str = "small") -> tuple[Run, ...]:
    """Fig. 4A as in the original code: the number of heads grows with the width, the width of a head is constant.

    polyhead reproduce fig-4a-heads.
    """
    base = _base(scale)
    return _by_data(scale, [widened(base, factor, heads=True) for factor in WIDTHS[scale]])


def fig_4b(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by training instances and depth.

    polyhead reproduce fig-4b (and fig-a4 for the loss).
    """
    base = _base(scale)
    return _by_data(scale, [replace(base, layers=layers) for layers in DEPTHS[scale]])


def fig_a4(scale: str = "small") -> tuple[Run, ...]:
    """The training loss of the runs of Fig. 4A and 4B.

    polyhead reproduce fig-a4.
    """
    return tuple(dict.fromkeys((*fig_4a(scale), *fig_4b(scale))))


def fig_5c(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by number of heads, down to one, at a constant total query-key-value width.

    polyhead reproduce fig-5c.
    """
    base = _base(scale)
    runs: tuple[Run, ...] = ()
    for heads in HEADS[scale]:
        shape = replace(base, heads=heads, head_dim=base.heads * base.head_dim // heads)
        runs += three(scale, shape, partial(sraven_task, scale))
    return runs


def fig_5d(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by number of features.

    polyhead reproduce fig-5d.
    """
    base = _base(scale)
    runs: tuple[Run, ...] = ()
    for features in FEATURES[scale]:
        runs += three(scale, base, partial(sraven_task, scale, features=features))
    return runs


def fig_a5(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by fraction of rule combinations held out.

    polyhead reproduce fig-a5.  The paper gives its fractions only in a plot.
    """
    base = _base(scale)
    runs: tuple[Run, ...] = ()
    for held_out in FRACTIONS[scale]:
        runs += three(scale, base, partial(sraven_task, scale, held_out=held_out))
    return runs


def _base(scale: str) -> Scale:
    return with_seeds(size(SRAVEN, scale), scale, 2)


def _by_data(scale: str, shapes: Sequence[Scale]) -> tuple[Run, ...]:
    """The runs of every shape with every share of the training instances."""
    runs: tuple[Run, ...] = ()
    for share, shape in itertools.product(DATA[scale], shapes):
        steps = max(round(shape.steps * share), 1)
        runs += three(scale, replace(shape, steps=steps), partial(sraven_task, scale))
    return runs


# -------------------------------------------------------------------------------------------------------------- claims
# The accuracy that solves SRAVEN.
SOLVED = 0.8


def solves(scores: Table) -> list[Verdict]:
    """Return the claims that all models reach `SOLVED` at the last, largest setting, and HYLA leads at the first."""
    smallest, largest = scores.iloc[0], scores.iloc[-1]
    parts = largest.rename(lambda model: f"{label(model)} at the largest").to_dict()
    verdicts = [above(f"at the largest setting that was run all models solve {100 * SOLVED:.0f} %", parts, SOLVED)]
    if "hyla" in smallest:
        parts = {}
        for model, estimate in smallest.drop("hyla").items():
            parts[f"HYLA over {label(model)}"] = smallest["hyla"] - estimate
        verdicts.append(above("at the smallest setting that was run HYLA is best", parts))
    return verdicts


def single_head(scores: Table) -> list[Verdict]:
    """Return the claim that a single head is worse than the next larger number of heads.  `scores`: rows by heads."""
    first, second, *_ = sorted(scores.index)
    if first != 1:  # without runs of a single head there is no claim
        return []
    return higher("a single head hurts", scores, second, first, f"{second} heads over 1")


def harder(scores: Table, axis: str) -> list[Verdict]:
    """Return the claim that the score falls from the smallest to the largest value of `axis`."""
    smallest, *_, largest = sorted(scores.index)
    return higher(f"SRAVEN gets harder with {axis}", scores, smallest, largest, f"{smallest:g} over {largest:g}")


def higher(claim: str, scores: Table, first: Any, second: Any, words: str) -> list[Verdict]:
    """Return the claim that each model has a higher score in row `first` than in row `second`."""
    parts = {}
    for model, lead in (scores.loc[first] - scores.loc[second]).items():
        parts[f"{label(model)}, {words}"] = lead
    return [above(claim, parts)]


# ------------------------------------------------------------------------------------------------------------- drawing
def by_instances(study: Study, axis: str) -> FigureOutcome:
    """Draw Fig. 4A (axis "width"), 4A with the original code's heads, 4B ("depth"): accuracy by training instances."""
    cells = study.cells(axis, "instances", "model")
    runs = outcome.runs_of(cells)
    verdicts: list[Verdict] = []
    if outcome.is_complete_grid(cells):
        scores = outcome.score_table(cells, "compositional").sort_index(level=["instances", axis])
        verdicts = ordered(scores, f"{len(scores)} settings") + solves(scores)
    levels = outcome.baseline_means(runs)
    panels = outcome.panels(cells, "compositional", label, partial("{} {:g}".format, axis), lambda _: levels)
    figure = figures.lines(panels, x_label="training instances", y_label="accuracy", log_x=True, limits=(0.0, 1.02))
    caption = f"Compositional accuracy by training instances, a panel per {axis}."
    rows, numbers = table(cells, ("compositional", "iid"))
    notes = [f"{name.replace('_', ' ')}: {estimate}" for name, estimate in outcome.baselines(runs).items()]
    notes.append(outcome.settings_note(cells))
    return FigureOutcome([Picture(study.figure, caption, figure)], rows, verdicts, notes, numbers)


def draw_a4(study: Study) -> FigureOutcome:
    """Draw training loss by instances: by width at the common depth, and by depth at the common width."""
    pictures = []
    numbers: dict[str, Any] = {}
    for letter, axis, other in (("a", "width", "depth"), ("b", "depth", "width")):
        all_cells = study.cells(other, axis, "instances", "model")
        # The value that most cells have is constant while the other axis varies.
        constant = all_cells.index.get_level_values(other).to_series().mode()[0]
        cells = all_cells[constant]
        panels = outcome.panels(cells, TRAINING_LOSS, label, partial("{} {:g}".format, axis), lambda _: {})
        figure = figures.lines(panels, x_label="training instances", y_label=TRAINING_LOSS, log_x=True)
        caption = f"{letter.upper()}: cross-entropy on the last training batches by {axis}."
        pictures.append(Picture(f"fig-a4{letter}", caption, figure))
        numbers |= table(cells, (TRAINING_LOSS,))[1]
    return FigureOutcome(pictures, numbers=numbers)


def over(study: Study, axis: str, claim: Callable[[Table], list[Verdict]]) -> FigureOutcome:
    """Draw Fig. 5C ("heads"), 5D ("features"), A5 ("held out"): accuracy along one axis."""
    cells = study.cells(axis, "model")
    curves = outcome.curves(outcome.scores_of(cells, "compositional"), label)
    panels: list[outcome.Panel] = [("", curves, outcome.baseline_curves(cells, "compositional"))]
    figure = figures.lines(panels, x_label=axis, y_label="accuracy", limits=(0.0, 1.02))
    verdicts: list[Verdict] = []
    if outcome.is_complete_grid(cells) and cells.index.unique(axis).size > 1:
        verdicts = claim(outcome.score_table(cells, "compositional"))
    picture = Picture(study.figure, f"Compositional accuracy by {axis}; {outcome.SEED_CAPTION}.", figure)
    rows, numbers = table(cells, ("compositional", "iid"))
    return FigureOutcome([picture], rows, verdicts, [outcome.settings_note(cells)], numbers)


def _figure(title: str, draw: Draw, runs: Callable[[str], tuple[Run, ...]], minutes: float) -> Figure:
    return Figure(title, HYLA, draw, runs, minutes, SRAVEN_GPU)


_FEATURES = partial(over, axis="features", claim=partial(harder, axis="the number of features"))
_FRACTION = partial(over, axis="held out", claim=partial(harder, axis="the fraction held out"))
FIGURES = {
    "fig-4a": _figure("Fig. 4A: data and width on SRAVEN", partial(by_instances, axis="width"), fig_4a, 50.4),
    "fig-4a-heads": _figure(
        "Fig. 4A, heads growing with width", partial(by_instances, axis="width"), fig_4a_heads, 67.0
    ),
    "fig-4b": _figure("Fig. 4B: data and depth on SRAVEN", partial(by_instances, axis="depth"), fig_4b, 31.5),
    "fig-5c": _figure("Fig. 5C: number of heads", partial(over, axis="heads", claim=single_head), fig_5c, 10.0),
    "fig-5d": _figure("Fig. 5D: number of features", _FEATURES, fig_5d, 6.4),
    "fig-a4": _figure("Fig. A4: training loss when scaling", draw_a4, fig_a4, 72.3),
    "fig-a5": _figure("Fig. A5: fraction held out on SRAVEN", _FRACTION, fig_a5, 10.1),
}
