"""Results without training: Table A2 (ambiguous instances) and Figure A9 (counts of tasks) of Schug et al. 2024."""

import math
from typing import Any

from polyhead.analysis import figures
from polyhead.analysis.claims import Estimate, Verdict, above
from polyhead.papers.hyla.rows import HYLA
from polyhead.papers.outcome import Curves, Figure, FigureOutcome, Picture
from polyhead.tasks import Score, Sraven
from polyhead.tasks.sraven import counts as sraven_counts
from polyhead.tasks.sraven.ambiguity import ambiguity

# (features, values) -> the paper's fraction of ambiguous instances of 4096 and its standard error.
TABLE_A2 = {(4, 4): (0.0642, 0.0038), (4, 8): (0.0032, 0.0009), (4, 16): (0.0005, 0.0003)}
DEFINITIONS = {"code": "the code's definition (every feature differs)", "text": "the text's (any answer differs)"}
# Numbers of values of a feature.
VALUES = (4, 8, 16)
# The fraction of ambiguous instances below which the paper calls them rare.
RARE = 0.005


def rarely_ambiguous(name: str, fraction: float, count: int) -> Verdict:
    """The claim that less than half a percent of the instances are ambiguous, by the definition `name`."""
    error = math.sqrt(max(fraction * (1 - fraction), 1 / count) / count)
    share = {f"{100 * RARE:g} % − {100 * fraction:.2f} % of {count}": Estimate(RARE - fraction, error, math.inf)}
    claim = f"at M 4, K 8 fewer than half a percent of the instances are ambiguous, by {name}"
    return above(claim, share, within=0.0)


def draw_a2(scale: str) -> FigureOutcome:
    """Draw Table A2: ambiguous instances by both definitions, and the Bayes-optimal accuracy."""
    count = 64 if scale == "smoke" else 4096
    rows = []
    numbers = {}
    verdicts = []
    for (features, values), (paper, error) in TABLE_A2.items():
        scores = ambiguity(Sraven(features=features, values=values), count)
        row = {
            "M": str(features),
            "K": str(values),
            "ambiguous, the code's definition": fraction_text(scores["code"]),
            "ambiguous, the text's": fraction_text(scores["text"]),
            "paper": f"{paper:.4f} ± {error:.4f}",
            "Bayes-optimal accuracy": fraction_text(scores["bayes"]),
        }
        rows.append(row)
        numbers[f"M {features}, K {values}"] = {name: vars(score) for name, score in scores.items()}
        if (features, values) == (4, 8):
            for name, words in DEFINITIONS.items():
                verdicts.append(rarely_ambiguous(words, scores[name].mean, scores[name].count))
    note = f"{count} instances of the training split, seed 0. ± is the standard error over instances."
    return FigureOutcome(table=rows, verdicts=verdicts, notes=[note], numbers=numbers)


def fraction_text(score: Score) -> str:
    """Return a fraction as text; 0 as "0 of n", because its standard error of 0 would be misleading."""
    if score.mean == 0:
        return f"0 of {score.count}"
    return f"{score.mean:.4f} ± {score.standard_error:.4f}"


def draw_a9(scale: str) -> FigureOutcome:
    """Draw Figure A9: counts of tasks and instances by number of features, by the paper's formula and exact."""
    task_curves: Curves = {}
    instance_curves: Curves = {}
    rows = []
    numbers: dict[str, dict[Any, Any]] = {"tasks": {}, "instances": {}}
    for features in range(2, 7):
        tasks = sraven_counts.tasks(features)
        row = {"M": str(features), "tasks, the paper's formula": f"{tasks.paper:,}", "tasks, exact": f"{tasks.exact:,}"}
        numbers["tasks"][features] = vars(tasks)
        for formula in ("paper", "exact"):
            task_curves.setdefault(formula, {})[features] = [math.log10(getattr(tasks, formula))]
        for values in VALUES:
            instances = sraven_counts.instances(features, values)
            row[f"instances K {values}, paper / exact"] = f"{instances.paper:.2e} / {instances.exact:.2e}"
            numbers["instances"][f"{features}, {values}"] = vars(instances)
            for formula in ("paper", "exact"):
                curve = instance_curves.setdefault(f"K {values}, {formula}", {})
                curve[features] = [math.log10(getattr(instances, formula))]
        rows.append(row)
    figure = figures.lines(
        [("A: tasks", task_curves, {}), ("B: instances", instance_curves, {})],
        x_label="features M",
        y_label="log10 of the count",
        columns=2,
    )
    caption = "Counts by number of features, on a logarithmic scale; M 1 is left out: the paper's formula gives 0."
    note = "The paper's C(R + M - 1, M) ((M!)^(G-1) - M) is 0 for M = 1, which is left out."
    return FigureOutcome([Picture("fig-a9", caption, figure)], rows, notes=[note], numbers=numbers)


FIGURES = {
    "fig-a9": Figure("Fig. A9: counts of tasks and instances", HYLA, draw_a9),
    "table-a2": Figure("Table A2: ambiguous instances", HYLA, draw_a2),
}
