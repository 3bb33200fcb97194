"""Fuzzy logic and SRAVEN, trained long: the figures and tests that docs/results/protocol.md fixed before the runs.

benchmarks/long_trainings.py trains the runs.  `draw` uses all finished runs.  A claim is judged if all its models have
a run; it is a test from five seeds on.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from polyhead.analysis import figures
from polyhead.papers.claims import Estimate, Verdict, above, judge
from polyhead.papers.hyla.rows import ROWS
from polyhead.papers.outcome import FigureOutcome, Picture
from polyhead.papers.study import FinishedRun, Study
from polyhead.tasks import FuzzyLogic, Sraven
from polyhead.tasks.fuzzy_logic.baselines import baselines as fuzzy_baselines
from polyhead.tasks.sraven.baselines import baselines as raven_baselines

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
BASELINES = {"recall": "Recall", "mix": "Mixture", "gaussian_process": "Gaussian process", "ceiling": "Exact ceiling"}
RAVEN_BASELINES = {"known_combinations": "Known combinations", "same_slot": "Same slot", "ceiling": "Exact ceiling"}
WORDS = {"r2": "R²", "accuracy": "accuracy"}
"""Metric of a task -> its name in the figure."""

MAIN = ("hyla", "softmax", "linear")
ABLATIONS = ("hyla-linear", "hyla-norms", "hyla-softmax", "linear-rms")
WIDTHS = (2, 4, 8, 16)
"""Widths of heads; the main test has the first."""
SETTINGS = {f"{name}-width-{width}": f"{ROWS[name].label}, width {width}" for name in MAIN for width in WIDTHS[1:]}
SETTINGS |= {"softmax-dropout": "Softmax, dropout 0.1", "softmax-decay": "Softmax, decay 1.0"}
NAMES = {name: ROWS[name].label for name in (*MAIN, *ABLATIONS)} | SETTINGS | BASELINES | RAVEN_BASELINES
TASKS = ("sraven-", "length-16-")
"""What the name of a run begins with if its task is not that of the main test."""

Tests = tuple[tuple[str, str, tuple[tuple[str, str, str | None], ...]], ...]
"""Family (p-values are corrected within one), claim, and the differences that must be above 0."""

Measured = Mapping[tuple[str, str], Mapping[int, float]]
"""A quantity and a model or baseline -> its value by seed.  Quantities: `unseen`, the R² on unseen combinations at the
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
        tuple(("unseen", model, baseline) for model in MAIN for baseline in ("same_slot", "known_combinations")),
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
    """Return baselines and ceiling on the split on which a run was scored; in fuzzy logic on the same sequences."""
    task, train, seed = point.run.task, point.run.train, point.run.seed
    count = train.eval_batches * train.batch_size
    if isinstance(task, Sraven):
        scores = raven_baselines(task, UNSEEN, sequences=count, seed=seed)
        return {name: scores[name].mean for name in RAVEN_BASELINES}
    assert isinstance(task, FuzzyLogic)
    scores = fuzzy_baselines(task, UNSEEN, sequences=count, seed=seed, batch_size=train.batch_size)
    return {name: scores[name].mean for name in BASELINES}


def measured(points: Iterable[FinishedRun]) -> dict[tuple[str, str], dict[int, float]]:
    """Return the quantities of the tests and the figure; see `Measured`."""
    quantities: dict[tuple[str, str], dict[int, float]] = {}
    baselines_by_seed: dict[int, dict[str, float]] = {}
    for point in points:
        model, seed = model_of(point), point.run.seed
        known, unseen = point.course(KNOWN), point.course(UNSEEN)
        values: dict[str, float | None] = {}
        for skill in SKILLS:
            values[f"at {skill:.2f}"] = at_skill(known, unseen, skill)
        values["known"] = point.score(KNOWN)
        values["unseen"] = point.score(UNSEEN)
        if NOVEL in point.result.scores:
            values["novel"] = point.score(NOVEL)
        values["gap"] = point.score(KNOWN) - point.score(UNSEEN)
        values["late"] = point.score(UNSEEN) - unseen[EARLY]
        values["equal"] = values[f"at {SKILL:.2f}"]
        for name, value in values.items():
            if value is not None:
                quantities.setdefault((name, model), {})[seed] = value
        if seed not in baselines_by_seed:
            baselines_by_seed[seed] = beside(point)
    for seed, scores in baselines_by_seed.items():
        for name, score in scores.items():
            quantities.setdefault(("unseen", name), {})[seed] = score
    return quantities


def model_of(point: FinishedRun) -> str:
    """Return the name of the model that a run trains: the run's name without its task and seed."""
    name = point.run.name.rpartition("-")[0]
    for task in TASKS:
        if name.startswith(task):
            return name.removeprefix(task)
    return name


# --------------------------------------------------------------------------------------------------------------- claims
def verdicts(quantities: Measured, seeds: tuple[int, ...] = SEEDS, tests: Tests = TESTS) -> list[Verdict]:
    """Return verdicts on the claims whose models have runs of the same seeds; differences are per seed."""
    claims = []
    for family, claim, differences in tests:
        parts = {}
        for quantity, one, other in differences:
            first = quantities.get((quantity, one), {})
            second: Mapping[int, float] = dict.fromkeys(seeds, 0.0)
            name = NAMES[one]
            if other is not None:
                second = quantities.get((quantity, other), {})
                name = f"{NAMES[one]} over {NAMES[other]}"
            by_seed = {seed: first[seed] - second[seed] for seed in seeds if seed in first and seed in second}
            if by_seed:
                parts[name] = Estimate.of(by_seed)
        if len(parts) == len(differences):
            claims.append(above(claim, parts, family=family))
    return list(judge(claims))


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
    """Return the runs of those seeds that one of the changed `models` has."""
    seeds = {point.run.seed for point in study.points if model_of(point) in models}
    return replace(study, points=tuple(point for point in study.points if point.run.seed in seeds))


def draw_ravens(study: Study) -> FigureOutcome:
    """The page of SRAVEN."""
    return _drawn(study, RAVENS)


def _drawn(study: Study, tests: Tests) -> FigureOutcome:
    """Draw scores on unseen combinations during training, and at equal skill on known ones; the tests, all numbers."""
    names = list(NAMES)
    all_points = sorted(study.points, key=lambda point: (names.index(model_of(point)), point.run.seed))
    quantities = measured(all_points)
    points = [point for point in all_points if point.run.seed in SEEDS] or all_points
    seeds = {point.run.seed for point in points}
    shown: dict[tuple[str, str], dict[int, float]] = {}
    for key, by_seed in quantities.items():
        shown[key] = {seed: value for seed, value in by_seed.items() if seed in seeds}

    courses: dict[str, dict[float, list[float]]] = {}
    skills: dict[str, dict[float, list[float]]] = {}
    for point in points:
        label = NAMES[model_of(point)]
        for step, value in point.course(UNSEEN).items():
            courses.setdefault(label, {}).setdefault(step / 1000, []).append(value)
        for skill in SKILLS:
            by_seed = quantities.get((f"at {skill:.2f}", model_of(point)), {})
            if point.run.seed in by_seed:
                skills.setdefault(label, {}).setdefault(skill, []).append(by_seed[point.run.seed])
    levels = {}
    for name in BASELINES | RAVEN_BASELINES:
        if ("unseen", name) in shown:
            levels[NAMES[name]] = Estimate.of(shown["unseen", name]).mean

    word = WORDS[points[0].run.task.metric]
    panels = [("in the course of training", courses, levels)]
    if skills:
        panels.append(("at equal skill", skills, levels))
    figure = figures.lines(
        panels,
        x_label=("optimiser steps, thousands", f"{word} on known combinations"),
        y_label=f"{word} on unseen combinations",
    )
    pictures = [Picture(study.figure, caption_of(points, word, skills), figure)]
    if tests in (TESTS, PARTS):
        pictures.append(beside_paper(f"{study.figure}-paper", shown, levels))
    head, rows = _table(all_points, quantities)
    return FigureOutcome(
        pictures=tuple(pictures),
        head=head,
        rows=rows,
        numbers=_numbers(quantities),
        verdicts=tuple(verdicts(quantities, tests=tests)),
        notes=_notes(quantities) if tests is TESTS else NOTES,
    )


def beside_paper(stem: str, quantities: Measured, levels: Mapping[str, float]) -> Picture:
    """Draw the scores at the end beside the paper's at the same setting."""
    ours = {}
    paper = {}
    for (quantity, model), by_seed in quantities.items():
        if quantity == "unseen" and model in ROWS:
            ours[NAMES[model]] = list(by_seed.values())
            printed = ROWS[model].fuzzy
            if printed is not None:
                paper[NAMES[model]] = (printed[0] / 100, printed[1] / 100, PAPER_SEEDS)
    caption = (
        "R² on unseen combinations at the end, full marks, beside Table A1 of the paper, hollow marks: means and "
        "standard errors over seeds. The paper chose the rate among four settings, and its splits may lack terms."
    )
    return Picture(stem, caption, figures.results(ours, baselines=levels, printed=paper))


def caption_of(
    points: Collection[FinishedRun], word: str, skills: Mapping[str, Mapping[float, Collection[float]]]
) -> str:
    """Return what is drawn, of how many runs; `skills`: the scores of a model's runs at each level on the right."""
    seeds_of: dict[str, list[int]] = {}
    for point in points:
        seeds_of.setdefault(NAMES[model_of(point)], []).append(point.run.seed)
    runs = ", ".join(f"{label} {len(seeds)}" for label, seeds in seeds_of.items())
    text = (
        f"{word[0].upper() + word[1:]} on unseen combinations: left in the course of training, right where the score "
        f"on known ones first reaches the value below. Runs: {runs}. "
    )
    drawn_skills: set[float] = set()
    for by_skill in skills.values():
        drawn_skills |= set(by_skill)
    fewer = []
    for label, seeds in seeds_of.items():
        for skill in sorted(drawn_skills):
            count = len(skills.get(label, {}).get(skill, ()))
            if count < len(seeds):
                fewer.append(f"{label} {count} at {skill:.2f}")
    if fewer:
        text += "A run that never reached a value, or had it from its first score on, has no point there. Points: "
        text += f"{', '.join(fewer)}. "
    text += "Baselines and ceiling are of the same splits."
    all_seeds: set[int] = set()
    for seeds in seeds_of.values():
        all_seeds |= set(seeds)
    if any(set(seeds) != all_seeds for seeds in seeds_of.values()):
        text += " Lines of different seeds are of different splits: compare such models seed by seed in the table."
    if min(map(len, seeds_of.values())) == 1:
        text += " With one seed, a difference between two models may be one between two trainings."
    return text


def _table(points: Iterable[FinishedRun], quantities: Measured) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the head of the table, and a row for each run and for the baselines of each seed."""
    columns = {"known": "known", "unseen": "unseen", "novel": "unknown terms", "gap": "known − unseen"}
    columns["late"] = f"gain after step {EARLY:,}"
    for skill in SKILLS:
        columns[f"at {skill:.2f}"] = f"unseen at known {skill:.2f}"
    split_of = {"known": KNOWN, "unseen": UNSEEN, "novel": NOVEL}  # quantities with a sampling error
    rows = []
    for point in points:
        model, seed = model_of(point), point.run.seed
        texts = [NAMES[model], str(seed)]
        for quantity in columns:
            value = quantities.get((quantity, model), {}).get(seed)
            if value is None:
                texts.append("–")
            elif quantity in split_of:
                texts.append(f"{value:.3f} ± {point.sampling(split_of[quantity]):.3f}".replace("-", "−"))
            else:
                texts.append(f"{value:.3f}".replace("-", "−"))
        rows.append(tuple(texts))
    for name in BASELINES | RAVEN_BASELINES:
        for seed, value in quantities.get(("unseen", name), {}).items():
            rows.append((NAMES[name], str(seed), "–", f"{value:.3f}", *["–"] * (len(columns) - 2)))
    return ("", "seed", *columns.values()), tuple(rows)


def _numbers(quantities: Measured) -> dict[str, dict[str, dict[str, float]]]:
    """Return all quantities as JSON, by model or baseline, quantity and seed."""
    numbers: dict[str, dict[str, dict[str, float]]] = {}
    for (quantity, name), by_seed in quantities.items():
        numbers.setdefault(NAMES[name], {})[quantity] = {str(seed): value for seed, value in by_seed.items()}
    return numbers


NOTES = ("± in the table is the standard error over the sequences of a score; it is part of the spread over seeds.",)


def _notes(quantities: Measured) -> tuple[str, ...]:
    """Return the notes of the main test, with its first family repeated with seed 6 in place of seed 1."""
    notes = [
        *NOTES,
        "The tests are those of docs/results/protocol.md. P-values are corrected within its families, 1 to 3 and 4 to "
        "7. The order HYLA, softmax, linear holds if 1 and 2 hold.",
    ]
    if 6 in quantities.get(("unseen", "hyla"), {}):
        for verdict in verdicts(quantities, AGAIN):
            if verdict.family == "primary":
                notes.append(f"With seed 6 in place of seed 1: {verdict}")
    return tuple(notes)
