"""SRAVEN, scores along one axis: Figures 4A, 4B and A4 (data and size), 5C (heads), 5D (features), A5 (held out)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.analysis import figures
from polyhead.config import Run
from polyhead.papers.claims import Estimate, Scores, Verdict, above
from polyhead.papers.figure import Figure
from polyhead.papers.hyla.fuzzy import axis_values, ordered, table
from polyhead.papers.hyla.rows import ROWS, label
from polyhead.papers.hyla.sizes import HYLA, SRAVEN, SRAVEN_GPU, THREE, grid, sraven_task
from polyhead.papers.outcome import (
    SEED_CAPTION,
    Baselines,
    Cells,
    FigureOutcome,
    Panel,
    Picture,
    baseline_curves,
    baseline_means,
    baselines,
    cells_by_model,
    is_complete_grid,
    score_curves,
    score_or_training_loss,
    scores_by_model,
)
from polyhead.papers.sizes import Scale, one_setting, size, widened, with_seeds
from polyhead.papers.study import TRAINING_LOSS, Study
from polyhead.tasks import Sraven

DATA = {"paper": (0.5, 1.0, 2.0), "small": (0.5, 1.0, 2.0), "smoke": (0.5, 1.0)}
WIDTHS = {"paper": (1.0, 2.0, 4.0), "small": (0.5, 1.0, 2.0), "smoke": (1.0, 2.0)}
DEPTHS = {"paper": (4, 8, 16), "small": (1, 2, 4), "smoke": (1, 2)}
HEADS = {"paper": (1, 2, 4, 8, 16), "small": (1, 2, 4, 8), "smoke": (1, 2)}
FEATURES = {"paper": (2, 3, 4), "small": (2, 3), "smoke": (2, 3)}
FRACTIONS = {"paper": (0.1, 0.25, 0.5, 0.75), "small": (0.1, 0.25, 0.5, 0.75), "smoke": (0.25, 0.5)}


def fig_4a(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by training instances and width.

    As in the paper's text, the model, query-key-value and MLP widths grow, and the number of heads is constant.
    polyhead reproduce fig-4a (and fig-a4 for the loss).  Small: one rate, one seed less.
    """
    return _scaling(scale, "width")


def fig_4a_heads(scale: str = "small") -> tuple[Run, ...]:
    """Fig. 4A as in the original code: the number of heads grows with the width, the width of a head is constant.

    polyhead reproduce fig-4a-heads.
    """
    return _scaling(scale, "heads")


def fig_4b(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by training instances and depth.

    polyhead reproduce fig-4b (and fig-a4 for the loss).
    """
    return _scaling(scale, "depth")


def fig_a4(scale: str = "small") -> tuple[Run, ...]:
    """The training loss of the runs of Fig. 4A and 4B.

    polyhead reproduce fig-a4.
    """
    return tuple(dict.fromkeys((*fig_4a(scale), *fig_4b(scale))))


def _scaling(scale: str, what: str) -> tuple[Run, ...]:
    base = with_seeds(size(SRAVEN, scale), scale, 2)
    runs: tuple[Run, ...] = ()
    for share in DATA[scale]:
        for value in DEPTHS[scale] if what == "depth" else WIDTHS[scale]:
            shape = replace(base, steps=max(round(base.steps * share), 1))
            if what == "depth":
                shape = replace(shape, layers=int(value))
            else:
                shape = widened(shape, value, heads=what == "heads")
            runs += _three(scale, shape, partial(sraven_task, scale))
    return runs


def _three(scale: str, shape: Scale, task: Callable[[int], Sraven]) -> tuple[Run, ...]:
    """The runs of the three models at the settings of `scale`; `task` maps a seed to a task."""
    return grid(task, THREE, shape, one_setting(shape, scale))


def fig_5c(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by number of heads, down to one, at a constant total query-key-value width.

    polyhead reproduce fig-5c.
    """
    base = with_seeds(size(SRAVEN, scale), scale, 2)
    runs: tuple[Run, ...] = ()
    for heads in HEADS[scale]:
        shape = replace(base, heads=heads, head_dim=base.heads * base.head_dim // heads)
        runs += _three(scale, shape, partial(sraven_task, scale))
    return runs


def fig_5d(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by number of features.

    polyhead reproduce fig-5d.
    """
    shape = with_seeds(size(SRAVEN, scale), scale, 2)
    runs: tuple[Run, ...] = ()
    for features in FEATURES[scale]:
        runs += _three(scale, shape, partial(sraven_task, scale, features=features))
    return runs


def fig_a5(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by fraction of rule combinations held out.

    polyhead reproduce fig-a5.  The paper gives its fractions only in a plot.
    """
    shape = with_seeds(size(SRAVEN, scale), scale, 2)
    runs: tuple[Run, ...] = ()
    for held_out in FRACTIONS[scale]:
        runs += _three(scale, shape, partial(sraven_task, scale, held_out=held_out))
    return runs


# --------------------------------------------------------------------------------------------------------------- claims
def solves(scores: Mapping[Any, Scores], level: float = 0.8) -> list[Verdict]:
    """Return the claims that all models reach `level` at the largest setting, and that HYLA is best at the smallest."""
    smallest, *_, largest = scores.values()
    parts = {f"{ROWS[model].label} at the largest": score for model, score in largest.items()}
    verdicts = [above(f"at the largest setting that was run all models solve {100 * level:.0f} %", parts, level)]
    if "hyla" in smallest:
        others = {model: score for model, score in smallest.items() if model != "hyla"}
        leads = {f"HYLA over {ROWS[model].label}": smallest["hyla"] - score for model, score in others.items()}
        verdicts.append(above("at the smallest setting that was run HYLA is best", leads))
    return verdicts


def single_head(scores: Mapping[int, Scores]) -> list[Verdict]:
    """Return the claim that a single head is worse than the next larger number of heads."""
    counts = sorted(scores)
    if counts[0] != 1:  # without runs of a single head there is no claim
        return []
    parts = {}
    for model, score in scores[1].items():
        if model in scores[counts[1]]:
            parts[f"{ROWS[model].label}, {counts[1]} heads over 1"] = scores[counts[1]][model] - score
    return [above("a single head hurts", parts)]


def harder(scores: Mapping[Any, Scores], what: str) -> list[Verdict]:
    """Return the claim that the score falls from the smallest to the largest value of `what`."""
    smallest, *_, largest = sorted(scores)
    parts = {}
    for model, score in scores[smallest].items():
        if model in scores[largest]:
            parts[f"{ROWS[model].label}, {smallest:g} over {largest:g}"] = score - scores[largest][model]
    return [above(f"SRAVEN gets harder with {what}", parts)]


# -------------------------------------------------------------------------------------------------------------- drawing
def by_instances(axis: str) -> Callable[[Study], FigureOutcome]:
    """Draw Fig. 4A (axis "width"), 4A with the original code's heads, 4B ("depth"): accuracy by training instances."""

    def draw(study: Study) -> FigureOutcome:
        cells = cells_by_model(study, axis, "instances")
        runs = [point.run for point in study.points]
        estimates = baselines(runs)
        verdicts: list[Verdict] = []
        if is_complete_grid(cells):
            order = sorted(cells, key=lambda condition: (condition[1], condition[0]))
            scores = {condition: scores_by_model(cells[condition], "compositional") for condition in order}
            verdicts = ordered(scores, f"{len(scores)} settings") + solves(scores)
        caption = f"Compositional accuracy by training instances, a panel per {axis}."
        figure = draw_scaling(cells, axis, "compositional", baseline_means(runs, estimates))
        outcome = table_of_axes(cells, (axis, "instances"), estimates)
        return replace(outcome, pictures=(Picture(study.figure, caption, figure),), verdicts=tuple(verdicts))

    return draw


def draw_a4(study: Study) -> FigureOutcome:
    """Draw training loss by instances: by width at the common depth, and by depth at the common width."""
    pictures = []
    numbers: dict[str, Any] = {}
    for letter, axis, other in (("a", "width", "depth"), ("b", "depth", "width")):
        base = commonest(study, other)
        cells = {}
        for (value, instances, constant), by_model in cells_by_model(study, axis, "instances", other).items():
            if constant == base:
                cells[value, instances] = by_model
        caption = f"{letter.upper()}: cross-entropy on the last training batches by {axis}."
        pictures.append(Picture(f"fig-a4{letter}", caption, draw_scaling(cells, axis, TRAINING_LOSS, {})))
        numbers |= table_of_axes(cells, (axis, "instances"), {}, TRAINING_LOSS).numbers
    return FigureOutcome(pictures=tuple(pictures), numbers=numbers)


def commonest(study: Study, axis: str) -> Any:
    """Return the value of `axis` in most runs: the constant value while the other axis varies."""
    values: list[Any] = [study.paper.places(point.run).get(axis) for point in study.points]
    return max(sorted(set(values)), key=values.count)


def draw_scaling(cells: Cells, axis: str, split: str, levels: Mapping[str, float]) -> Any:
    """Draw scores by training instances, a panel per value of `axis`."""
    panels: list[Panel] = []
    for value in axis_values(cells, 0):
        points: dict[Any, dict[str, Estimate]] = {}
        for condition in sorted(cells):
            if condition[0] == value:
                by_model = cells[condition]
                points[condition[1]] = {model: score_or_training_loss(cell, split) for model, cell in by_model.items()}
        panels.append((f"{axis} {value:g}", score_curves(points, label), levels))
    y_label = "accuracy"
    limits: tuple[float | None, float | None] = (0.0, 1.02)
    if split == TRAINING_LOSS:
        y_label = TRAINING_LOSS
        limits = (None, None)
    return figures.lines(panels, x_label="training instances", y_label=y_label, log_x=True, limits=limits)


def over(axis: str, claim: Callable[[Mapping[Any, Scores]], list[Verdict]]) -> Callable[[Study], FigureOutcome]:
    """Draw Fig. 5C ("heads"), 5D ("features"), A5 ("held out"): accuracy along one axis."""

    def draw(study: Study) -> FigureOutcome:
        cells = cells_by_model(study, axis)
        by_x = {x: cells[(x,)] for x in axis_values(cells, 0)}
        points = {x: scores_by_model(by_model, "compositional") for x, by_model in by_x.items()}
        panel: Panel = ("", score_curves(points, label), baseline_curves(by_x, "compositional"))
        figure = figures.lines([panel], x_label=axis, y_label="accuracy", limits=(0.0, 1.02))
        verdicts = claim(points) if is_complete_grid(cells) and len(cells) > 1 else []
        picture = Picture(study.figure, f"Compositional accuracy by {axis}; {SEED_CAPTION}.", figure)
        return replace(table_of_axes(cells, (axis,), {}), pictures=(picture,), verdicts=tuple(verdicts))

    return draw


def table_of_axes(cells: Cells, axes: tuple[str, ...], estimates: Baselines, split: str = "") -> FigureOutcome:
    """Return a table with a row per place, named by its axes; baselines are notes."""
    named = {}
    for condition in sorted(cells):
        named[", ".join(f"{axis} {value:g}" for axis, value in zip(axes, condition, strict=True))] = cells[condition]
    outcome = table(named, (split,) if split else ("compositional", "iid"))
    notes = [f"{name.replace('_', ' ')}: {estimate}" for name, estimate in estimates.items()]
    return replace(outcome, notes=(*notes, *outcome.notes))


def _figure(
    title: str,
    draw: Callable[[Study], FigureOutcome],
    runs: Callable[[str], tuple[Run, ...]],
    minutes: float,
) -> Figure:
    return Figure(title, HYLA, draw, runs, minutes, SRAVEN_GPU)


FIGURES = {
    "fig-4a": _figure("Fig. 4A: data and width on SRAVEN", by_instances("width"), fig_4a, 50.4),
    "fig-4a-heads": _figure("Fig. 4A, heads growing with width", by_instances("width"), fig_4a_heads, 67.0),
    "fig-4b": _figure("Fig. 4B: data and depth on SRAVEN", by_instances("depth"), fig_4b, 31.5),
    "fig-5c": _figure("Fig. 5C: number of heads", over("heads", single_head), fig_5c, 10.0),
    "fig-5d": _figure(
        "Fig. 5D: number of features", over("features", partial(harder, what="the number of features")), fig_5d, 6.4
    ),
    "fig-a4": _figure("Fig. A4: training loss when scaling", draw_a4, fig_a4, 72.3),
    "fig-a5": _figure(
        "Fig. A5: fraction held out on SRAVEN",
        over("held out", partial(harder, what="the fraction held out")),
        fig_a5,
        10.1,
    ),
}
