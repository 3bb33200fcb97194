"""Results without training: Table A2 (ambiguous instances) and Figure A9 (counts of tasks) of Schug et al. 2024."""

import math

from polyhead.analysis import figures
from polyhead.papers.claims import Estimate, Verdict, above
from polyhead.papers.figure import Figure
from polyhead.papers.hyla.sizes import HYLA
from polyhead.papers.outcome import FigureOutcome, Panel, Picture
from polyhead.tasks import Score, Sraven
from polyhead.tasks.sraven import counts as sraven_counts
from polyhead.tasks.sraven.ambiguity import ambiguity

TABLE_A2 = {(4, 4): (0.0642, 0.0038), (4, 8): (0.0032, 0.0009), (4, 16): (0.0005, 0.0003)}
"""(features, values) -> the paper's fraction of ambiguous instances of 4096 and its standard error."""


def rarely_ambiguous(name: str, fraction: float, count: int, most: float = 0.005) -> Verdict:
    """The claim that less than half a percent of the instances are ambiguous, by the definition `name`."""
    error = math.sqrt(max(fraction * (1 - fraction), 1 / count) / count)
    share = {f"{100 * most:g} % − {100 * fraction:.2f} % of {count}": Estimate(most - fraction, error, math.inf)}
    claim = f"at M 4, K 8 fewer than half a percent of the instances are ambiguous, by {name}"
    return above(claim, share, within=0.0)


def draw_a2(scale: str) -> FigureOutcome:
    """Draw Table A2: ambiguous instances by both definitions, and the Bayes-optimal accuracy."""
    count = {"smoke": 64}.get(scale, 4096)
    rows, found, verdicts = [], {}, []
    for (features, values), (paper, error) in TABLE_A2.items():
        task = Sraven(features=features, values=values)
        measured = ambiguity(task, count)
        texts = [_share(measured[name]) for name in ("code", "text", "bayes")]
        rows.append((str(features), str(values), *texts[:2], f"{paper:.4f} ± {error:.4f}", texts[2]))
        found[f"M {features}, K {values}"] = {name: vars(score) for name, score in measured.items()}
        if (features, values) == (4, 8):
            named = {"code": "the code's definition (every feature differs)", "text": "the text's (any answer differs)"}
            verdicts = [rarely_ambiguous(words, measured[n].mean, measured[n].count) for n, words in named.items()]
    head = ("M", "K", "ambiguous, the code's definition", "ambiguous, the text's", "paper", "Bayes-optimal accuracy")
    note = f"{count} instances of the training split, seed 0. ± is the standard error over instances."
    return FigureOutcome(head=head, rows=tuple(rows), verdicts=tuple(verdicts), notes=(note,), numbers=found)


def _share(score: Score) -> str:
    """A fraction as text; 0 is written as "none of n", because its standard error of 0 would be misleading."""
    none = f"0 of {score.count}"
    return none if score.mean == 0 else f"{score.mean:.4f} ± {score.standard_error:.4f}"


def draw_a9(scale: str) -> FigureOutcome:
    """Draw Figure A9: counts of tasks and instances by number of features, by the paper's formula and exact."""
    features, sizes = range(2, 7), (4, 8, 16)
    tasks = {m: sraven_counts.tasks(m) for m in features}
    made = {(m, k): sraven_counts.instances(m, k) for m in features for k in sizes}
    by_name = {name: {m: [math.log10(getattr(tasks[m], name))] for m in features} for name in ("paper", "exact")}
    by_size = {
        f"K {k}, {name}": {m: [math.log10(getattr(made[m, k], name))] for m in features}
        for k in sizes
        for name in ("paper", "exact")
    }
    panels: list[Panel] = [("A: tasks", by_name, {}), ("B: instances", by_size, {})]
    figure = figures.lines(panels, x_label="features M", y_label="log10 of the count", columns=2)
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
    note = "The paper's C(R + M - 1, M) ((M!)^(G-1) - M) is 0 for M = 1, which is left out."
    caption = (
        "Counts by number of features, on a logarithmic scale; M 1 is left out, for which the paper's formula gives 0."
    )
    return FigureOutcome((Picture("fig-a9", caption, figure),), head, tuple(rows), notes=(note,), numbers=found)


FIGURES = {
    "fig-a9": Figure("Fig. A9: counts of tasks and instances", HYLA, draw_a9),
    "table-a2": Figure("Table A2: ambiguous instances", HYLA, draw_a2),
}
