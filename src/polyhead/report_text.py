"""The words of a report: who is ahead of whom on unseen combinations, how sure that is, and what the terms mean.

Nothing is claimed that the seeds do not carry: one mechanism "beats" another only where Welch's t-test over at
least two seeds each gives p < 0.05; otherwise they are apart by no more than chance, or one is ahead "in these
runs".
"""

import math
from collections.abc import Sequence

from polyhead.report_data import Group, Summary

FLOORS = {
    "context_mean": ("Context mean", "predicts the mean target of the examples"),
    "nearest_neighbour": ("Nearest neighbour", "copies the target of the closest example"),
    "ridge": ("Ridge regression", "fits a line to the examples"),
    "gaussian_process": ("Gaussian process", "interpolates smoothly between the examples"),
    "ceiling": ("Exact ceiling", "knows the family of functions and enumerates those that fit the examples"),
}
METRICS = {"r2": "R²", "accuracy": "accuracy", "mse": "mean squared error"}
Scored = tuple[Group, Summary]


def floor_name(name: str) -> str:
    return FLOORS.get(name, (name.replace("_", " ").capitalize(), ""))[0]


def metric_name(name: str) -> str:
    return METRICS.get(name, name.replace("_", " "))


def number(value: float | None, digits: int = 3) -> str:
    """A number as a report prints it: a true minus sign, a dash for what is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f}".replace("-", "−")


def with_error(summary: Summary, digits: int = 3) -> str:
    if summary.error is None or not math.isfinite(summary.error) or not math.isfinite(summary.mean):
        return number(summary.mean, digits)
    return f"{number(summary.mean, digits)}\u00a0±\u00a0{number(summary.error, digits)}"  # no line break inside


def seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def ranked(found: Sequence[Group], split: str = "compositional") -> list[Scored]:
    """Groups with a finite score on `split`, best first."""
    scored = [(group, score) for group in found if (score := group.score(split)) and math.isfinite(score.mean)]
    return sorted(scored, key=lambda pair: -pair[1].mean)


def p_value(a: Summary, b: Summary) -> float | None:
    """Welch's t-test over seeds; None where one side has a single seed."""
    if a.n < 2 or b.n < 2:
        return None
    from scipy.stats import t as student

    va, vb = ((x.error or 0.0) ** 2 for x in (a, b))  # squared standard errors
    if va + vb == 0.0:
        return 1.0 if a.mean == b.mean else 0.0
    freedom = (va + vb) ** 2 / (va**2 / (a.n - 1) + vb**2 / (b.n - 1))
    return float(2 * student.sf(abs(a.mean - b.mean) / math.sqrt(va + vb), freedom))


def compared(order: Sequence[Scored]) -> tuple[list[str], list[str], list[str]]:
    """The rivals of the first: clearly beaten, too close to call, and not to be judged because a side has one seed."""
    beaten: list[str] = []
    close: list[str] = []
    single: list[str] = []
    for group, other in order[1:]:
        p = p_value(order[0][1], other)
        (single if p is None else beaten if p < 0.05 else close).append(group.label)
    return beaten, close, single


def title(found: Sequence[Group]) -> str:
    """The headline, in one line."""
    order = ranked(found)
    if not order:
        return "No finished run with a compositional score yet"
    best, score = order[0]
    at = f"{metric_name(best.task.metric)} {number(score.mean, 2)}"
    if len(order) == 1:
        return f"{best.label} reaches {at} on unseen combinations"
    beaten, close, single = compared(order)
    if single:
        return f"{best.label} is ahead on unseen combinations in these runs ({at})"
    if not beaten:
        return f"{best.label} is ahead on unseen combinations ({at}), but the seeds do not settle it"
    rest = f"; {_and(close)} {_are(close)} too close to call" if close else ""
    return f"{best.label} beats {_and(beaten)} on unseen combinations ({at}){rest}"


def verdict(found: Sequence[Group], table: dict[str, dict[str, Summary]]) -> list[str]:
    """The sentences under the headline: the ranking, its certainty, the floors, the gap to known combinations."""
    order = ranked(found)
    if not order:
        return ["The runs below have no result to compare: finish them (polyhead resume) and write the report again."]
    metric = metric_name(order[0][0].task.metric)
    bases = list(dict.fromkeys(_basis(score) for _, score in order))
    each = [with_error(score) + (f" ({_basis(score)})" if len(bases) > 1 else "") for _, score in order]
    listed = "; ".join(f"{group.label} {value}" for (group, _), value in zip(order, each, strict=True))
    basis = f" ({bases[0]})" if len(bases) == 1 else ""
    lines = [f"Compositional {metric}{basis}, best first: {listed}."]
    lines += _certainty(order)
    lines += _against_floors(order, table)
    return lines + _gap(order)


def _basis(score: Summary) -> str:
    if score.over == "seeds":
        return f"mean ± standard error over {score.n} seeds"
    return "one seed; ± is over test sequences"


def _certainty(order: Sequence[Scored]) -> list[str]:
    if len(order) < 2:
        return ["One seed: another may differ."] if order[0][1].n == 1 else []
    best, score = order[0]
    lines = []
    for group, other in order[1:]:
        p = p_value(score, other)
        if p is None:
            continue
        apart = f"by {number(score.mean - other.mean)} (Welch's t-test over seeds, {_p(p)})"
        beats = f"{best.label} beats {group.label} {apart}."
        lines.append(
            beats if p < 0.05 else f"{best.label} is ahead of {group.label} {apart}: too little to be sure of."
        )
    if compared(order)[2]:
        lines.append("With one seed on a side, the order of two mechanisms may change with the next seed.")
    return lines


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _against_floors(order: Sequence[Scored], table: dict[str, dict[str, Summary]]) -> list[str]:
    floors = {name: row["compositional"] for name, row in table.items() if "compositional" in row}
    ceiling = floors.pop("ceiling", None)
    if not floors:
        return []
    name = max(floors, key=lambda key: floors[key].mean)
    floor = floors[name]
    sides: dict[str, list[str]] = {"above": [], "level with": [], "below": []}
    for group, score in order:
        spread = math.hypot(score.error or 0.0, floor.error or 0.0)
        apart = score.mean - floor.mean
        sides["level with" if abs(apart) <= 2 * spread else "above" if apart > 0 else "below"].append(group.label)
    parts = [f"{_and(labels)} {_are(labels)} {side} it" for side, labels in sides.items() if labels]
    where = "; ".join(parts) + ("." if sides["above"] else ", so no score here is evidence of composition.")
    lines = [f"The best predictor that composes nothing ({floor_name(name)}) scores {number(floor.mean)}: {where}"]
    if ceiling is not None:
        lines.append(f"A solver that knows the family of functions scores {number(ceiling.mean)}, the ceiling.")
    return lines


def _gap(order: Sequence[Scored]) -> list[str]:
    gaps = [(group.label, iid.mean - score.mean) for group, score in order if (iid := group.score("iid"))]
    if not gaps:
        return []
    each = _and([f"{number(gap)} for {label}" for label, gap in gaps])
    return [f"From known to unseen combinations the score falls by {each}."]


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def definitions(task_name: str, metric: str) -> list[tuple[str, str]]:
    """Terms of the report, each with its meaning."""
    return [_METRIC if metric == "r2" else (metric_name(metric), f"The headline metric of {task_name}."), *_TERMS]


_METRIC = (
    "R², per sequence",
    "1 − (prediction − target)² / v, where v is the population variance of all targets of the same sequence, averaged "
    "over sequences. 1 is perfect; predicting the mean of the examples scores slightly below 0.",
)
_TERMS = (
    ("iid", "Fresh sequences of the training tasks: combinations of terms the model was trained on."),
    ("compositional", "Combinations of terms that never occurred together in training, although each term did."),
    ("novel", "Combinations of terms that never occurred in training at all."),
    (
        "Floors",
        "Predictors that see the same examples and compose nothing. A score that does not exceed them is no evidence "
        "of composition. GP: Gaussian process; 1-NN: nearest neighbour.",
    ),
    ("Ceiling", "The best possible answer: the mean prediction of all functions of the family that fit every example."),
    ("±", "Standard error of the mean: over seeds where there are several, else over test sequences."),
    ("Latent code", "The attention scores of one query-key pair after normalising: one number per head."),
    (
        "Code maps",
        "Codes of the query token attending to itself on unseen combinations, all with the same context inputs, in two "
        "dimensions (t-SNE or PCA). Distances between far clusters of a t-SNE map mean nothing.",
    ),
    (
        "Probe F1",
        "Macro F1 of a logistic regression (scikit-learn's defaults on standardised codes) from the code to a term, "
        "fitted on iid sequences and scored on compositional ones, with one query token for all of them or each its "
        "own. The terms of a function are sorted, so term 1 and term 2 have different frequencies: compare each with "
        "its own chance.",
    ),
    (
        "Chance",
        "The exact expected macro F1 of guessing each term with its frequency in the fitting sequences. A probe that "
        "finds nothing in the code names the commonest terms only, which macro F1 puts below chance.",
    ),
)
