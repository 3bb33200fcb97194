"""The first sections of a report: scores beside baselines, verdicts on their order, curves of training."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from polyhead.analysis import figures
from polyhead.analysis.claims import SEEDS, Estimate, above, constant, judge
from polyhead.pages.report.runs import Entry, SeedGroup, different_settings, headline_split
from polyhead.pages.report.section import Draft, Section, Table, grouped_digits, number, with_error
from polyhead.tasks.base import Task
from polyhead.tasks.scores import Score

METRICS = {"r2": "R²", "mse": "mean squared error"}
TEST_COLUMNS = ("interval", "p (Holm)", "networks")
OPEN_TEST = f"Fewer than {SEEDS} networks on a side are no test: undecided."


@dataclass(frozen=True)
class Results:
    """Runs of one task, and its baselines by name and split."""

    groups: list[SeedGroup]
    splits: list[str]
    baselines: dict[str, dict[str, Score]]
    notes: list[str]

    @property
    def task(self) -> Task:
        return self.groups[0].task

    @property
    def headline(self) -> str:
        return headline_split(self.groups)

    def ranked(self) -> list[SeedGroup]:
        """Groups with a score on the headline's split, best first."""
        scored = [group for group in self.groups if group.score(self.headline) is not None]
        return sorted(scored, key=lambda group: -self.task.gain(self.headline_score(group).mean))

    def headline_score(self, group: SeedGroup) -> Estimate:
        """The score on the headline's split of a group of `ranked`."""
        score = group.score(self.headline)
        assert score is not None
        return score

    def baseline_order(self) -> list[str]:
        """Baselines and ceiling with a score on the headline's split, best first."""
        names = [name for name, by_split in self.baselines.items() if self.headline in by_split]
        return sorted(names, key=lambda name: -self.task.gain(self.baselines[name][self.headline].mean))


# ------------------------------------------------------------------------------------------------------------- wording
def metric_name(task: Task) -> str:
    return METRICS.get(task.metric, task.metric.replace("_", " "))


def baseline_label(task: Task, name: str) -> str:
    if name in task.words.baselines:
        return task.words.baselines[name].label
    return name.replace("_", " ").capitalize()


def title(results: Results) -> str:
    """The headline, in one line: "Best on unseen combinations: HYLA (R² 0.93)"."""
    split_name = results.task.split_name(results.headline)
    order = results.ranked()
    if not order:
        return f"No finished run with a score on {split_name} yet"
    score = results.headline_score(order[0])
    return f"Best on {split_name}: {order[0].label} ({metric_name(results.task)} {number(score.mean, 2)})"


# -------------------------------------------------------------------------------------------------------------- tables
def score_table(results: Results) -> Table:
    """Mechanisms, best first, then baselines: scores by split, networks, parameters, seconds of training."""
    task = results.task
    head = ["", *map(task.split_name, results.splits), "networks", "parameters", "seconds"]
    rows = []
    ranked = results.ranked()
    unranked = [group for group in results.groups if group.finished and group not in ranked]
    for group in [*ranked, *unranked]:
        scores = map(with_error, map(group.score, results.splits))
        sizes = [grouped_digits(group.mean("parameters")), grouped_digits(group.mean("seconds"))]
        rows.append([group.label, *scores, networks(group, results.headline), *sizes])
    for name in results.baseline_order():
        scores = map(with_error, map(results.baselines[name].get, results.splits))
        label = baseline_label(task, name)
        if name != "ceiling":
            label += " (baseline)"
        rows.append([label, *scores, "–", "–", "–"])
    return head, rows


def networks(group: SeedGroup, split: str) -> str:
    """How many networks are finished or diverged; "5 of 6" if only five of them have a finite score."""
    count = len(group.finished) + sum(entry.diverged for entry in group.entries)
    missing = sum(map(math.isnan, group.by_seeds(split).values()))
    if missing:
        return f"{count - missing} of {count}"
    return str(count)


def verdict_table(results: Results) -> Table | None:
    """Is the best mechanism ahead of each other one, and is each mechanism ahead of the best baseline?

    The scores themselves say which mechanism is the best.  So all pairs are judged together, and p is two-sided.
    """
    task = results.task
    order = results.ranked()
    differences = {}
    pairs, hidden = [], []
    for better, rival in itertools.combinations(order, 2):
        name = f"{better.label} over {rival.label}"
        differences[name] = _gains(results, better) - _gains(results, rival)
        pairs.append(name)
        if better is not order[0]:
            hidden.append(name)
    best_baseline = next((name for name in results.baseline_order() if name != "ceiling"), None)
    if best_baseline is not None:
        level = constant(float(task.gain(results.baselines[best_baseline][results.headline].mean)))
        for group in order:
            differences[f"{group.label} over {baseline_label(task, best_baseline)}"] = _gains(results, group) - level
    if not differences:
        return None
    rows = [row for row in comparison_rows(differences, two_sided=pairs) if row[0] not in hidden]
    return ["Is it ahead?", "verdict", "difference", *TEST_COLUMNS], rows


def comparison_rows(differences: Mapping[str, Estimate], two_sided: Collection[str] = ()) -> list[list[str]]:
    """Rows of differences that are judged together: name, verdict, difference, `TEST_COLUMNS`."""
    rows = []
    claim = above("the first is ahead", differences)
    parts = []
    for part in claim.parts:
        if part.name in two_sided:
            part = replace(part, sides=2)
        parts.append(part)
    for part in judge([replace(claim, parts=tuple(parts))])[0].parts:
        low, high = part.estimate.interval(part.confidence)
        interval = "–"
        if part.is_tested:
            interval = f"{number(low)} to {number(high)} ({100 * part.confidence:.4g} %)"
        count = f"{part.estimate.runs:.0f}"
        rows.append([part.name, part.verdict, number(part.estimate.mean), interval, number(part.p_above), count])
    return rows


def _gains(results: Results, group: SeedGroup) -> Estimate:
    """Scores on the headline's split over seeds, negated if lower is better."""
    estimate = group.estimate(results.headline, group.by_seeds(results.headline))
    return estimate.scaled(results.task.gain(1.0))


# ------------------------------------------------------------------------------------------------------------ sections
def results_section(results: Results, draft: Draft) -> Section:
    """A figure and a table of the scores, the verdicts on them, and the settings that differ."""
    section = Section("results", "Results")
    task, split = results.task, results.headline
    order = results.ranked()
    metric = metric_name(task)
    if order:
        levels = {}
        for name in results.baseline_order():
            levels[baseline_label(task, name)] = results.baselines[name][split].mean
        measured, errors = {}, {}
        for group in order:
            score = results.headline_score(group)
            measured[group.label] = score.by_seed
            if math.isfinite(score.error):
                errors[group.label] = score.error
        figure = figures.results(
            measured,
            errors=errors,
            baselines=levels,
            lower_is_better=task.better == "lower",
            score=f"{metric} on {task.split_name(split)}",
        )
        caption = f"Scores on {task.split_name(split)}: a dot per network, the mean with its standard error."
        section.figures.append(draft.add("results", figure, caption))
    # The table has all runs, also those without a score on the headline's split.
    section.tables.append(score_table(results))
    verdicts = verdict_table(results)
    if verdicts:
        section.tables.append(verdicts)
    rows = different_settings(results.groups)
    if rows and len(results.groups) > 1:
        head = ["Besides the kinds of heads, these differ", *(group.label for group in results.groups)]
        section.tables.append((head, rows))
    section.note = (
        f"± is the standard error over networks; of a single network or a baseline, over test {task.items}. "
        "Where the test data are finite, their sampling error is added. "
        "A test takes a baseline as exact; that of several divisions is a mean over them. "
        "A network that diverged leaves its comparisons undecided; an unfinished one is not counted. "
        f"{OPEN_TEST}"
    )
    return section


def curves_section(results: Results, draft: Draft) -> Section | None:
    """The loss and the scores during training; None if no run has rows."""
    task = results.task
    section = Section("curves", "Learning curves")
    for split in (None, *results.splits):
        series = {}
        for group in results.groups:
            points = _curve(group.entries, split)
            if points:
                series[group.label] = points
        if not series:
            continue
        levels = {}
        for name, by_split in results.baselines.items():
            words = task.words.baselines.get(name)
            if split in by_split and (words is None or words.drawn):
                levels[baseline_label(task, name)] = by_split[split].mean
        if split is None:
            panel, y_label, caption = "", "training loss", "Training loss"
            log_y = True
            for points in series.values():
                log_y &= min(map(min, points.values())) > 0  # a logarithmic axis has no loss of 0
        else:
            panel, y_label, log_y = task.split_name(split), metric_name(task), False
            caption = f"{y_label[0].upper()}{y_label[1:]} on {panel}"  # `capitalize` would make other letters small
        figure = figures.lines([(panel, series, levels)], x_label="optimiser step", y_label=y_label, log_y=log_y)
        caption += " by step, mean over networks."
        section.figures.append(draft.add(f"curves-{split or 'loss'}", figure, caption))
    if not section.figures:
        return None
    return section


def _curve(entries: Sequence[Entry], split: str | None) -> dict[figures.Number, list[float]]:
    """The values of all seeds by step."""
    points: dict[figures.Number, list[float]] = {}
    for entry in entries:
        for step, y in entry.curve(split).items():
            points.setdefault(step, []).append(y)
    return points
