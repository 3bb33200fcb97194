"""The text of a report: the ranking on unseen combinations, and its certainty.

One mechanism "beats" another only if Welch's t-test with at least two seeds on each side gives p < 0.05, corrected by
Holm over all rivals of the best.  Otherwise the report says "ahead, but the seeds do not settle it", or with single
seeds "ahead in these runs".
"""

import math
from collections.abc import Iterable, Sequence

from polyhead.config import Task
from polyhead.config.words import Floor, Parts
from polyhead.pages.report.runs import Entry, SeedGroup, Summary, Table, headline
from polyhead.spec.numbers import holm
from polyhead.spec.optional import optional

METRICS = {"r2": "R²", "accuracy": "accuracy", "mse": "mean squared error"}
WHERE = {
    "compositional": "unseen combinations",
    "novel": "what was never seen in training",
    "iid": "fresh data",
}
"""The description of a split, unless its task has one."""
PARTS = Parts(
    "part",
    read="each part",
    maps="Each point is the code of one query attending to itself: {count} sequences of unseen combinations.",
)
"""The words for tasks that do not name their parts."""
SELF = "the last query token attending to itself, on the task as it was trained (the definition in the paper)"
Scored = tuple[SeedGroup, Summary]


def floor(task: Task, name: str) -> Floor:
    """The words of a task's floor."""
    return task.words.floors.get(name) or Floor(name.replace("_", " ").capitalize(), "")


def metric_name(name: str) -> str:
    return METRICS.get(name, name.replace("_", " "))


def split_name(split: str) -> str:
    """ "novel hexominoes"."""
    return split.replace("_", " ")


def sample(task: Task, split: str) -> str:
    """The samples of a split: "compositional sequences", "unseen shapes (stripes)"."""
    return task.words.splits.get(split, f"{split_name(split)} {task.items}")


def split_words(task: Task, split: str) -> str:
    """The description of a split: "unseen combinations"."""
    return task.words.splits.get(split) or WHERE.get(split, f"the {split} split")


def number(value: float | None, digits: int = 3) -> str:
    """A number as text: with a true minus sign, and a dash for a number that is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f}".replace("-", "−")


def with_error(summary: Summary, digits: int = 3) -> str:
    if summary.error is None or not math.isfinite(summary.error) or not math.isfinite(summary.mean):
        return number(summary.mean, digits)
    return f"{number(summary.mean, digits)}\u00a0±\u00a0{number(summary.error, digits)}"  # no line break inside


def span(counts: Iterable[int]) -> str:
    """The least and the largest of several counts: "2,000", or "359 to 2,000"."""
    found = sorted(counts)
    return " to ".join(f"{count:,}" for count in dict.fromkeys((found[0], found[-1])))


def seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def where(found: Sequence[SeedGroup]) -> str:
    """The description of the headline's split."""
    return split_words(found[0].task, headline(found))


def iid_words(found: Sequence[SeedGroup]) -> str:
    """The description of iid samples beside the headline's split."""
    return "known combinations" if where(found) == WHERE["compositional"] else "fresh data"


def ranked(found: Sequence[SeedGroup], split: str | None = None) -> list[Scored]:
    """The groups with a finite score on `split` (default: the headline's), best first."""
    split = split or headline(found)
    scored = [(group, score) for group in found if (score := group.score(split)) and math.isfinite(score.mean)]
    return sorted(scored, key=lambda pair: -pair[0].task.gain(pair[1].mean))


def p_value(a: Summary, b: Summary) -> float | None:
    """The p-value of Welch's t-test over seeds; None if one side has a single seed."""
    if a.n < 2 or b.n < 2:
        return None
    with optional("report", "polyhead[report]"):
        from scipy.stats import t as student

    va, vb = ((x.error or 0.0) ** 2 for x in (a, b))  # squared standard errors
    if va + vb == 0.0:
        return 1.0 if a.mean == b.mean else 0.0
    freedom = (va + vb) ** 2 / (va**2 / (a.n - 1) + vb**2 / (b.n - 1))
    return float(2 * student.sf(abs(a.mean - b.mean) / math.sqrt(va + vb), freedom))


def p_values(order: Sequence[Scored]) -> list[float | None]:
    """Of the best against each rival, corrected by Holm: among eight equal mechanisms one often "beats" another."""
    found = [p_value(order[0][1], other) for _, other in order[1:]]
    tested = iter(holm([p for p in found if p is not None]))
    return [p if p is None else next(tested) for p in found]


def compared(order: Sequence[Scored]) -> tuple[list[str], list[str], list[str]]:
    """The rivals of the best: significantly worse, not significantly different, and untested (a side has one seed)."""
    beaten: list[str] = []
    close: list[str] = []
    single: list[str] = []
    for (group, _), p in zip(order[1:], p_values(order), strict=True):
        (single if p is None else beaten if p < 0.05 else close).append(group.label)
    return beaten, close, single


def title(found: Sequence[SeedGroup]) -> str:
    """The headline, in one line."""
    order = ranked(found)
    if not order:
        done = any(group.finished for group in found)
        return f"No finite score on {where(found)}" if done else f"No finished run with a score on {where(found)} yet"
    (best, score), unseen = order[0], where(found)
    at = f"{metric_name(best.task.metric)} {number(score.mean, 2)}"
    if len(order) == 1:
        return f"{best.label} reaches {at} on {unseen}"
    beaten, close, single = compared(order)
    second, other = order[1]
    if single:
        if second.label in single and _level(score, other):
            both = f"{at} and {number(other.mean, 2)}, {seeds(min(score.n, other.n))}"
            return f"{best.label} and {second.label} are level on {unseen} ({both})"
        return f"{best.label} is ahead on {unseen} in these runs ({at})"
    if not beaten and score.mean == other.mean:  # for example both always right
        return f"{best.label} and {second.label} are level on {unseen} ({at})"
    if not beaten:
        return f"{best.label} is ahead on {unseen} ({at}), but the seeds do not settle it"
    rest = f"; {and_(close)} {_are(close)} too close to call" if close else ""
    return f"{best.label} beats {and_(beaten)} on {unseen} ({at}){rest}"


def _level(a: Summary, b: Summary) -> bool:
    """Whether two scores differ by at most two standard errors."""
    return abs(a.mean - b.mean) <= 2 * math.hypot(a.error or 0.0, b.error or 0.0)


def verdict(found: Sequence[SeedGroup], table: Table) -> list[str]:
    """The sentences under the headline: the ranking, its certainty, the floors, the gap to known combinations."""
    order = ranked(found)
    if not order and (any(g.finished for g in found) or all(entry.failure for g in found for entry in g.entries)):
        return ["No finished run below has a finite score to compare: they diverged, or were not scored."]
    if not order:
        return ["The runs below have no result to compare: finish them (polyhead resume) and write the report again."]
    metric = metric_name(order[0][0].task.metric)
    bases = [_basis(score, group.task) for group, score in order]
    same = len(set(bases)) == 1
    each = [f"{g.label} {with_error(x)}" + f" ({own})" * (not same) for (g, x), own in zip(order, bases, strict=True)]
    split = headline(found)
    lines = [f"{split_name(split).capitalize()} {metric}{f' ({bases[0]})' * same}, best first: {'; '.join(each)}."]
    if lost := [g.label for g in found if (own := g.score(split)) and not math.isfinite(own.mean)]:
        lines.append(f"{and_(lost)} {_are(lost)} not ranked: a seed has no finite score.")
    if fewer := [g.label for g, _ in order if any(entry.failure for entry in g.entries)]:
        lines.append(f"Of {and_(fewer)} a seed failed: the numbers are those of the other seeds.")
    lines += _certainty(order)
    lines += against_floors(order, table, split)
    return lines + (_gap(order, where(found)) if split != "iid" else [])


def opening(found: Sequence[SeedGroup], table: Table, told: str = "") -> tuple[list[str], list[str]]:
    """The first sentences of a report, at most three, and the notes below its table.

    The sentences: the gain in the second half of training (or the scores), the gap to known combinations, the best
    floor.
    """
    lines, order, split = [*course(found), *verdict(found, table)], ranked(found), headline(found)
    telling = [] if told else lines[:1]
    if order and split != "iid":
        telling += _gap(order, where(found))
    telling += against_floors(order, table, split)[:1] if order else []
    return [*telling, *([told] if told else [])], [line for line in lines if line not in telling]


Course = tuple[str, float, float, float, float]
Halves = tuple[int, float, float]


def courses(found: Sequence[SeedGroup]) -> list[Course]:
    """For each mechanism, best first: label, score on iid at half of the training and at the end, the same on the
    headline's split; means over seeds.  [] if one of the splits was not scored during training."""
    split, metric = headline(found), found[0].task.metric
    rows: list[Course] = []
    for group, _ in ranked(found) if split != "iid" else ():
        both = [[_halves(entry, metric, which) for entry in group.finished] for which in ("iid", split)]
        if any(pair is None for each in both for pair in each):
            return []
        a, b, c, d = (sum(pair[i] for pair in each if pair) / len(each) for each in both for i in (1, 2))
        rows.append((group.label, a, b, c, d))
    return rows


def _halves(entry: Entry, metric: str, split: str) -> Halves | None:
    """The last score up to half of the training, after its step, and the final score."""
    rows = [*zip(*entry.curve("eval", metric, split), strict=True)]
    early = [row for row in rows if 0 < row[0] <= entry.run.train.steps / 2]
    return (*early[-1], rows[-1][1]) if early else None


def _later(found: Sequence[SeedGroup]) -> str:
    """ "In the second half of training", or "After step 6,000" where the first of `courses` is not at the half."""
    entries = [entry for group in found for entry in group.finished]
    which = ("iid", headline(found))
    pairs = [(entry, _halves(entry, found[0].task.metric, split)) for entry in entries for split in which]
    if all(pair is None or 2 * pair[0] == entry.run.train.steps for entry, pair in pairs):
        return "In the second half of training"
    return f"After step {span(pair[0] for _, pair in pairs if pair)} of training"


def course(found: Sequence[SeedGroup]) -> list[str]:
    """The gain in the second half of training, on known and on unseen combinations."""
    rows = courses(found)
    if not rows:
        return []
    each, gain = [], found[0].task.gain
    for label, before, after, early, late in rows:
        first, second = _by(gain(after - before)), _by(gain(late - early))
        second = second.removeprefix(f"{first.split()[0]} ")  # the verb is said once
        each.append(f"{label} {first} on {iid_words(found)} and {second} on {where(found)}")
    return [f"{_later(found)} {'; '.join(each)}."]


def _by(change: float) -> str:
    return f"{'gained' if change >= 0 else 'lost'} {number(abs(change))}"


def _basis(score: Summary, task: Task) -> str:
    if score.over == "seeds":
        return f"mean ± standard error over {score.n} seeds"
    return f"one seed; ± is over test {task.items}"


def _certainty(order: Sequence[Scored]) -> list[str]:
    if len(order) < 2:
        return ["One seed: another may differ."] if order[0][1].n == 1 else []
    best, score = order[0]
    lines = []
    found = p_values(order)
    several = " after Holm" * (sum(p is not None for p in found) > 1)
    for (group, other), p in zip(order[1:], found, strict=True):
        if p is not None and score.mean == other.mean:
            lines.append(f"{best.label} and {group.label} have the same mean.")
        elif p is not None:
            sure = p < 0.05
            apart = f"by {number(abs(score.mean - other.mean))} (Welch's t-test over seeds, {_p(p)}{several})"
            told = f"{best.label} {'beats' if sure else 'is ahead of'} {group.label} {apart}"
            lines.append(f"{told}{'' if sure else ': too little to be sure of'}.")
    if compared(order)[2]:
        lines.append("With one seed on a side, the order of two mechanisms may change with the next seed.")
    return lines


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def against_floors(order: Sequence[Scored], table: Table, split: str) -> list[str]:
    floors = {name: row[split] for name, row in table.items() if split in row}
    ceiling = floors.pop("ceiling", None)
    lines = [_best_floor(order, floors)] if floors else []
    if ceiling is not None:
        lines.append(f"A solver that knows the whole family scores {number(ceiling.mean)}, the ceiling.")
    return lines


def _best_floor(order: Sequence[Scored], floors: dict[str, Summary]) -> str:
    task = order[0][0].task
    gain, lower = task.gain, task.better == "lower"
    name = max(floors, key=lambda key: gain(floors[key].mean))
    best, words = floors[name], floor(task, name)
    better, worse = ("below", "above") if lower else ("above", "below")
    sides: dict[str, list[str]] = {better: [], "level with": [], worse: []}
    for group, score in order:
        spread = math.hypot(score.error or 0.0, best.error or 0.0)
        apart = gain(score.mean) - gain(best.mean)
        sides["level with" if abs(apart) <= 2 * spread else better if apart > 0 else worse].append(group.label)
    parts = [f"{and_(labels)} {_are(labels)} {side} it" for side, labels in sides.items() if labels]
    where = "; ".join(parts)
    if lower:
        return f"Without any network {words.label} comes to {number(best.mean)}: {where}."
    if words.by:
        return f"Without any relation, by {words.by}, a learner scores {number(best.mean)}: {where}."
    if name == "chance":
        return f"Guessing scores {number(best.mean)}: {where}."
    where += "." if sides[better] else ", so no score here is evidence of composition."
    return f"The best predictor that composes nothing new ({words.label}) scores {number(best.mean)}: {where}"


def _gap(order: Sequence[Scored], unseen: str) -> list[str]:
    gaps = [(g.label, g.task.gain(iid.mean - score.mean)) for g, score in order if (iid := g.score("iid"))]
    if not gaps:
        return []
    way = "rises" if order[0][0].task.better == "lower" else "falls"
    each = and_([f"{number(gap)} for {label}" for label, gap in gaps])
    known = "known" if unseen == WHERE["compositional"] else "fresh data of the kind that was trained on"
    return [f"From {known} to {unseen} the score {way} by {each}."]


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def and_(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ------------------------------------------------------------------------------------------------------ latent codes
def probing(parts: Parts, count: int, *, several_queries: bool) -> list[str]:
    """The introduction to a section on probes."""
    reads = (
        f"A logistic regression reads {parts.read} off the code of the last query token, one number per head. It is "
        f"fitted on {count:,} sequences of training tasks and scored on {count:,} of unseen combinations."
    )
    first = (
        "In layer 1 a code that is not normalised over keys depends on the query token and its own position alone: "
        "with one query for all, attending to itself, it is one code, from which nothing can be read."
    )
    own = (
        f" What a code says depends on the query it is asked about, so the {parts.name}s are easier to find when all "
        "sequences share one query (mean over several such probes) than when each has its own. "
    )
    return [reads + (own if several_queries else " All sequences have the same query token. ") + first]


def clustering(parts: Parts, count: int) -> list[str]:
    """The introduction to a section on clusters."""
    share = (
        f"The share of each code's nearest neighbours, among {count:,} sequences of unseen combinations, with the same "
        "label: 1 if labels are separated, the chance level if they are mixed. Equal sequences count once."
    )
    return [f"{share} {parts.compare}".rstrip()]


def zeroing(metric: str, count: int) -> list[str]:
    """The introduction to a section on zeroed heads."""
    return [
        f"The drop of the {metric} on {count:,} sequences of unseen combinations when the latent code of one head, or "
        "of all heads of a layer, is zeroed. The sequences are the same each time, and the model is not retrained. The "
        "head that matters most was chosen by these numbers, so its drop is overstated."
    ]


ALIKE = (
    "The cosine similarity of the mean codes of two rules, on unseen combinations: 1 for the same direction, 0 for "
    "orthogonal codes. Rules with the same code are computed by the same value network.",
    "Plain similarities (as in the paper) are all near 1 if the codes of all rules share a large component. For "
    "centred similarities the mean code of all rules is subtracted first: they show which rules differ from the mean "
    "in the same direction. For rules that do not differ they show noise, so compare them with the probes.",
)
