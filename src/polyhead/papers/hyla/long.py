"""Fuzzy logic and SRAVEN, trained long: the figures and tests that docs/results/protocol.md fixed before the runs.

benchmarks/long_trainings.py trains the runs.  `draw` uses all finished runs.  A claim is judged if all its models have
a run; it is a test from five seeds on.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from polyhead.analysis import figures
from polyhead.papers.claims import Estimate, Verdict, above, judge
from polyhead.papers.hyla.rows import ROWS
from polyhead.papers.outcome import FigureOutcome, Picture
from polyhead.papers.study import FinishedRun, Study
from polyhead.tasks import FuzzyLogic, Sraven
from polyhead.tasks.fuzzy_logic.floors import floors as fuzzy_floors
from polyhead.tasks.sraven.floors import floors as raven_floors

SEEDS = (1, 2, 3, 4, 5)
"""The seeds of the tests, without seed 0, which chose the rates."""
AGAIN = (2, 3, 4, 5, 6)
"""Seed 6 in place of seed 1, which the demo had looked at: a line beside the main test, and no part of its figure."""
SKILLS = (0.80, 0.85, 0.90, 0.94)
"""Levels of R² on known combinations at which models are compared; the test is at `SKILL`."""
SKILL, EARLY = 0.90, 5000
PAPER_SEEDS = 3
"""Of Table A1 in the paper."""
KNOWN, UNSEEN, NOVEL = "iid", "compositional", "novel"
FLOORS = {"recall": "Recall", "mix": "Mixture", "gaussian_process": "Gaussian process", "ceiling": "Exact ceiling"}
RAVEN_FLOORS = {"known_combinations": "Known combinations", "same_slot": "Same slot", "ceiling": "Exact ceiling"}
WORDS = {"r2": "R²", "accuracy": "accuracy"}
"""Metric of a task -> its name in the figure."""

MAIN = ("hyla", "softmax", "linear")
ABLATIONS = ("hyla-linear", "hyla-norms", "hyla-softmax", "linear-rms")
WIDTHS = (2, 4, 8, 16)
"""Widths of heads; the main test has the first."""
SETTINGS = {f"{name}-width-{width}": f"{ROWS[name].label}, width {width}" for name in MAIN for width in WIDTHS[1:]}
SETTINGS |= {"softmax-dropout": "Softmax, dropout 0.1", "softmax-decay": "Softmax, decay 1.0"}
NAMES = {name: ROWS[name].label for name in (*MAIN, *ABLATIONS)} | SETTINGS | FLOORS | RAVEN_FLOORS
TASKS = ("sraven-", "length-16-")
"""What the name of a run begins with if its task is not that of the main test."""

Tests = tuple[tuple[str, str, tuple[tuple[str, str, str | None], ...]], ...]
"""Family (p-values are corrected within one), claim, and the differences that must be above 0."""

Measured = Mapping[tuple[str, str], Mapping[int, float]]
"""A quantity and a model or floor -> its value by seed.  Quantities: `unseen`, the R² on unseen combinations at the
end; `equal`, that at equal skill; `gap`, known less unseen; `late`, the gain on unseen ones after `EARLY` steps."""

TESTS: Tests = (
    ("primary", "1. on unseen combinations HYLA is better than softmax", (("unseen", "hyla", "softmax"),)),
    ("primary", "2. on unseen combinations softmax is better than linear", (("unseen", "softmax", "linear"),)),
    ("primary", "3. on unseen combinations HYLA is better than linear", (("unseen", "hyla", "linear"),)),
    (
        "secondary",
        f"4. at equal skill, R² {SKILL:.2f} on known combinations, HYLA is better on unseen ones",
        (("equal", "hyla", "softmax"),),
    ),
    (
        "secondary",
        "5. on unseen combinations models are above floors",
        (
            ("unseen", "hyla", "recall"),
            ("unseen", "softmax", "recall"),
            ("unseen", "hyla", "mix"),
            ("unseen", "hyla", "gaussian_process"),
        ),
    ),
    ("secondary", f"6. HYLA gains on unseen combinations after step {EARLY:,}", (("late", "hyla", None),)),
    (
        "secondary",
        f"6. softmax gains on unseen combinations after step {EARLY:,} (no difference is expected)",
        (("late", "softmax", None),),
    ),
    ("secondary", "7. softmax loses more than HYLA from known to unseen", (("gap", "softmax", "hyla"),)),
)
"""Of the three models of the main test."""

PARTS: Tests = (
    ("parts", "HYLA composes better than without its nonlinearity", (("unseen", "hyla", "hyla-linear"),)),
    ("parts", "HYLA composes better than without RMSHead", (("unseen", "hyla", "hyla-norms"),)),
    ("parts", "HYLA composes better than with a softmax for RMSHead", (("unseen", "hyla", "hyla-softmax"),)),
    ("parts", "linear heads compose better with RMSHead", (("unseen", "linear-rms", "linear"),)),
)
"""Of the ablations: the dated addition to the protocol that was written before their first step."""

WIDE: Tests = (
    ("settings", "with heads of width 8 HYLA is better than softmax", (("unseen", "hyla-width-8", "softmax-width-8"),)),
    (
        "settings",
        "with heads of width 8 softmax is better than linear",
        (("unseen", "softmax-width-8", "linear-width-8"),),
    ),
    ("settings", "HYLA composes better with heads of width 8", (("unseen", "hyla-width-8", "hyla"),)),
    ("settings", "softmax composes better with dropout on its code", (("unseen", "softmax-dropout", "softmax"),)),
    ("settings", "softmax composes better with ten times the decay", (("unseen", "softmax-decay", "softmax"),)),
)
"""Of the other settings: the dated addition to the protocol that was written before their first step."""


def of_width(model: str, width: int) -> str:
    """Return the name of a model's runs with heads of this width."""
    return model if width == WIDTHS[0] else f"{model}-width-{width}"


def width_tests() -> Tests:
    """Return HYLA over softmax and softmax over linear heads at every width, in one family."""
    tests = []
    for width in WIDTHS:
        for one, other in itertools.pairwise(MAIN):
            claim = f"with heads of width {width} {ROWS[one].label} is better than {ROWS[other].label}"
            tests.append(("width", claim, (("unseen", of_width(one, width), of_width(other, width)),)))
    return tuple(tests)


WIDTH = width_tests()
"""Of the width of heads: the dated addition to the protocol that was written before their first step."""

RAVENS: Tests = (
    *(("primary", claim, parts) for _, claim, parts in TESTS[:3]),
    ("secondary", TESTS[3][1].replace("R²", "accuracy"), TESTS[3][2]),
    (
        "secondary",
        "5. on unseen combinations models are above floors",
        tuple(("unseen", model, floor) for model in MAIN for floor in ("same_slot", "known_combinations")),
    ),
    ("secondary", "6. softmax loses more than HYLA from known to unseen", TESTS[-1][2]),
)
"""Of SRAVEN: the dated addition to the protocol that was written before the first step of seed 1."""


def at_skill(known: Mapping[int, float], unseen: Mapping[int, float], skill: float) -> float | None:
    """The score on unseen combinations when the score on known ones reaches `skill`.

    It is interpolated linearly between the first evaluation at or above `skill` and the evaluation before it.  None if
    `skill` is never reached, or already at the first evaluation.

    >>> at_skill({1: 0.75, 2: 1.0}, {1: 0.5, 2: 0.75}, 0.875)
    0.625
    """
    for before, after in itertools.pairwise(sorted(known)):
        if known[before] >= skill:
            return None
        if known[after] >= skill:
            share = (skill - known[before]) / (known[after] - known[before])
            return unseen[before] + share * (unseen[after] - unseen[before])
    return None


def beside(point: FinishedRun) -> dict[str, float]:
    """Floors and ceiling on the split on which a run was scored; in fuzzy logic on the same sequences."""
    task, train, seed = point.run.task, point.run.train, point.run.seed
    count = train.eval_batches * train.batch_size
    if isinstance(task, Sraven):
        found, wanted = raven_floors(task, UNSEEN, sequences=count, seed=seed), RAVEN_FLOORS
    else:
        assert isinstance(task, FuzzyLogic)
        found, wanted = fuzzy_floors(task, UNSEEN, sequences=count, seed=seed, batch_size=train.batch_size), FLOORS
    return {name: found[name].mean for name in wanted}


def measured(points: Iterable[FinishedRun]) -> dict[tuple[str, str], dict[int, float]]:
    """The quantities of the tests and the figure; see `Measured`."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    levels: dict[int, dict[str, float]] = {}
    for point in points:
        model, seed = _model(point), point.run.seed
        known, unseen = point.course(KNOWN), point.course(UNSEEN)
        values: dict[str, float | None] = {f"at {skill:.2f}": at_skill(known, unseen, skill) for skill in SKILLS}
        values |= {"known": point.score(KNOWN), "unseen": point.score(UNSEEN)}
        values |= {"novel": point.score(NOVEL)} if NOVEL in point.result.scores else {}
        values |= {"gap": point.score(KNOWN) - point.score(UNSEEN), "late": point.score(UNSEEN) - unseen[EARLY]}
        values["equal"] = values[f"at {SKILL:.2f}"]
        for name, value in values.items():
            if value is not None:
                found.setdefault((name, model), {})[seed] = value
        if seed not in levels:
            levels[seed] = beside(point)
    for seed, by in levels.items():
        for name, value in by.items():
            found.setdefault(("unseen", name), {})[seed] = value
    return found


def _model(point: FinishedRun) -> str:
    name = point.run.name.rpartition("-")[0]
    return next((name.removeprefix(task) for task in TASKS if name.startswith(task)), name)


# --------------------------------------------------------------------------------------------------------------- claims
def verdicts(found: Measured, seeds: tuple[int, ...] = SEEDS, tests: Tests = TESTS) -> list[Verdict]:
    """Verdicts on the claims whose models have runs of the same seeds; differences are per seed."""
    stated = []
    for family, claim, differences in tests:
        parts = {_named(a, b): _over(found, quantity, a, b, seeds) for quantity, a, b in differences}
        known = {name: part for name, part in parts.items() if part is not None}
        if len(known) == len(parts):
            stated.append(above(claim, known, family=family))
    return list(judge(stated))


def _named(one: str, other: str | None) -> str:
    return NAMES[one] if other is None else f"{NAMES[one]} over {NAMES[other]}"


def _over(found: Measured, quantity: str, one: str, other: str | None, seeds: tuple[int, ...]) -> Estimate | None:
    mine = found.get((quantity, one), {})
    theirs = dict.fromkeys(seeds, 0.0) if other is None else found.get((quantity, other), {})
    values = {seed: mine[seed] - theirs[seed] for seed in seeds if seed in mine and seed in theirs}
    return Estimate.of(values) if values else None


# -------------------------------------------------------------------------------------------------------------- drawing
def draw(study: Study) -> FigureOutcome:
    """The page of the main test."""
    return _drawn(study, TESTS)


def draw_parts(study: Study) -> FigureOutcome:
    """The page of the ablations, beside the models that they change: of the runs `beside_changed`."""
    return _drawn(study, PARTS)


def draw_settings(study: Study) -> FigureOutcome:
    """The page of other heads, dropout and decay, in the same way."""
    return _drawn(study, WIDE)


def draw_width(study: Study) -> FigureOutcome:
    """The page of the width of heads: R² on unseen combinations over the width, a line per kind of heads."""
    found = measured(study.points)
    curves: dict[str, dict[float, list[float]]] = {}
    for model in MAIN:
        for width in WIDTHS:
            by_seed = found.get(("unseen", of_width(model, width)), {})
            scores = [score for seed, score in by_seed.items() if seed in SEEDS]
            if scores:
                curves.setdefault(NAMES[model], {})[width] = scores
    figure = figures.lines([("", curves, {})], x_label="width of a head", y_label="R², unseen", log_x=True)
    caption = "R² on unseen combinations after 50,000 steps by the width of heads: standard errors, a dot per seed."
    head, rows = _table(study.points, found)
    return FigureOutcome(
        pictures=(Picture(study.figure, caption, figure),),
        head=head,
        rows=rows,
        numbers=_numbers(found),
        verdicts=tuple(verdicts(found, tests=WIDTH)),
        notes=(*NOTES, "Parameters grow with the width of heads."),
    )


def draw_length(study: Study) -> FigureOutcome:
    """The page of the three models that see 15 examples."""
    return _drawn(study, TESTS[:3])


def beside_changed(study: Study, models: Collection[str]) -> Study:
    """The runs of those seeds that one of the changed `models` has."""
    seeds = {point.run.seed for point in study.points if _model(point) in models}
    return replace(study, points=tuple(point for point in study.points if point.run.seed in seeds))


def draw_ravens(study: Study) -> FigureOutcome:
    """The page of SRAVEN."""
    return _drawn(study, RAVENS)


def _drawn(study: Study, tests: Tests) -> FigureOutcome:
    """Draw scores on unseen combinations during training, and at equal skill on known ones; the tests, all numbers."""
    everything = sorted(study.points, key=lambda point: (list(NAMES).index(_model(point)), point.run.seed))
    found = measured(everything)
    points = [point for point in everything if point.run.seed in SEEDS] or everything
    seeds = {point.run.seed for point in points}
    shown = {key: {seed: value for seed, value in by.items() if seed in seeds} for key, by in found.items()}
    courses: dict[str, dict[float, list[float]]] = {}
    skills: dict[str, dict[float, list[float]]] = {}
    for point in points:
        label = NAMES[_model(point)]
        for step, value in point.course(UNSEEN).items():
            courses.setdefault(label, {}).setdefault(step / 1000, []).append(value)
        for skill in SKILLS:
            if point.run.seed in (at := found.get((f"at {skill:.2f}", _model(point)), {})):
                skills.setdefault(label, {}).setdefault(skill, []).append(at[point.run.seed])
    floors = {name: shown["unseen", name] for name in FLOORS | RAVEN_FLOORS if ("unseen", name) in shown}
    levels = {NAMES[name]: Estimate.of(by_seed).mean for name, by_seed in floors.items()}
    word = WORDS[points[0].run.task.metric]
    panels = [("in the course of training", courses, levels), ("at equal skill", skills, levels)]
    figure = figures.lines(
        [panel for panel in panels if panel[1]],
        x_label=("optimiser steps, thousands", f"{word} on known combinations"),
        y_label=f"{word} on unseen combinations",
    )
    head, rows = _table(everything, found)
    more = _beside_paper(f"{study.figure}-paper", shown, levels) if tests in (TESTS, PARTS) else ()
    return FigureOutcome(
        pictures=(Picture(study.figure, _caption(points, word, skills), figure), *more),
        head=head,
        rows=rows,
        numbers=_numbers(found),
        verdicts=tuple(verdicts(found, tests=tests)),
        notes=_notes(found) if tests is TESTS else NOTES,
    )


def _beside_paper(stem: str, found: Measured, levels: Mapping[str, float]) -> tuple[Picture, ...]:
    """The scores at the end beside the paper's at the same setting, in a picture of their own."""
    ours = {model: by for (quantity, model), by in found.items() if quantity == "unseen" and model in ROWS}
    paper = {model: score for model in ours if (score := ROWS[model].fuzzy) is not None}
    figure = figures.results(
        {NAMES[model]: list(by.values()) for model, by in ours.items()},
        baselines=levels,
        printed={NAMES[model]: (mean / 100, error / 100, PAPER_SEEDS) for model, (mean, error) in paper.items()},
    )
    caption = (
        "R² on unseen combinations at the end, full marks, beside Table A1 of the paper, hollow marks: means and "
        "standard errors over seeds. The paper chose the rate among four settings, and its splits may lack terms."
    )
    return (Picture(stem, caption, figure),)


def _caption(
    points: Collection[FinishedRun], word: str, skills: Mapping[str, Mapping[float, Collection[float]]]
) -> str:
    """What is drawn, of how many runs; `skills`: the scores of a model's runs at each level of the right panel."""
    count = Counter(NAMES[_model(point)] for point in points)
    runs = ", ".join(f"{label} {n}" for label, n in count.items())
    drawn = sorted({skill for by in skills.values() for skill in by})
    reached = {(label, skill): len(skills.get(label, {}).get(skill, ())) for label in count for skill in drawn}
    fewer = [f"{label} {n} at {skill:.2f}" for (label, skill), n in reached.items() if n < count[label]]
    less = "A run that never reached a value, or had it from its first score on, has no point there. Points: "
    less += f"{', '.join(fewer)}. "
    one = " With one seed, a difference between two models may be one between two trainings."
    seeds = {label: {point.run.seed for point in points if NAMES[_model(point)] == label} for label in count}
    unlike = any(own != set().union(*seeds.values()) for own in seeds.values())
    other = " Lines of different seeds are of different splits: compare such models seed by seed in the table."
    return (
        f"{word[0].upper() + word[1:]} on unseen combinations: left in the course of training, right where the score "
        f"on known ones first reaches the value below. Runs: {runs}. "
        + less * bool(fewer)
        + "Baselines and ceiling are of the same splits."
        + other * unlike
        + one * (min(count.values()) == 1)
    )


def _table(points: Iterable[FinishedRun], found: Measured) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The head of the table, and a row for each run and for the floors of each seed."""
    columns = {"known": "known", "unseen": "unseen", "novel": "unknown terms", "gap": "known − unseen"}
    columns |= {"late": f"gain after step {EARLY:,}"}
    columns |= {f"at {skill:.2f}": f"unseen at known {skill:.2f}" for skill in SKILLS}
    sampled = {"known": KNOWN, "unseen": UNSEEN, "novel": NOVEL}  # quantities with a sampling error
    head, rows = ("", "seed", *columns.values()), []
    for point in points:
        model, seed = _model(point), point.run.seed
        cells = []
        for quantity in columns:
            value = found.get((quantity, model), {}).get(seed)
            error = f" ± {point.sampling(sampled[quantity]):.3f}" if quantity in sampled and value is not None else ""
            cells.append("–" if value is None else f"{value:.3f}{error}".replace("-", "−"))
        rows.append((NAMES[model], str(seed), *cells))
    for name in FLOORS | RAVEN_FLOORS:
        for seed, value in found.get(("unseen", name), {}).items():
            rows.append((NAMES[name], str(seed), "–", f"{value:.3f}", *["–"] * (len(head) - 4)))
    return head, tuple(rows)


def _numbers(found: Measured) -> dict[str, dict[str, dict[str, float]]]:
    """All quantities as JSON, by model or floor, quantity and seed."""
    numbers: dict[str, dict[str, dict[str, float]]] = {}
    for (quantity, name), by_seed in found.items():
        numbers.setdefault(NAMES[name], {})[quantity] = {str(seed): value for seed, value in by_seed.items()}
    return numbers


NOTES = ("± in the table is the standard error over the sequences of a score; it is part of the spread over seeds.",)


def _notes(found: Measured) -> tuple[str, ...]:
    again = verdicts(found, AGAIN) if 6 in found.get(("unseen", "hyla"), {}) else []
    return (
        *NOTES,
        "The tests are those of docs/results/protocol.md. P-values are corrected within its families, 1 to 3 and 4 to "
        "7. The order HYLA, softmax, linear holds if 1 and 2 hold.",
        *(f"With seed 6 in place of seed 1: {verdict}" for verdict in again if verdict.family == "primary"),
    )
