"""Claims as statistical tests on measured scores, and the estimates that the tests read: of papers and of reports.

A claim of a paper is written before any result is known, as "each of these numbers is above its margin".  A number has
one value per seed; over several settings, the mean is taken for each seed.  Each number is a *part* with a verdict:

    yes             its one-sided p-value (Student's t over seeds), corrected by Holm over the family, is below 0.05
    no              the same test in the other direction passes
    no difference   its two-sided 90 % interval lies within `within` of the margin: two one-sided tests at 0.05
    undecided       none of these, fewer than five seeds, or a run without a finite score

The claim has "yes" if all its parts have it, and "no" if one part has it.  A claim of no difference (`no_difference`)
has "yes" where a part has no difference, and "no" where a part passes in either direction.
"""

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

from polyhead.spec.optional import optional

YES, NO, NO_DIFFERENCE, UNDECIDED = "yes", "no", "no difference", "undecided"
# The least number of seeds for a test.
SEEDS = 5
# The level of every one-sided test.
ALPHA = 0.05
# A smaller difference between scores (fractions) counts as none. For logarithms this is two per cent.
WITHIN = 0.02
# A spread over seeds, or a difference without a spread, that is only rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and degrees of freedom.

    Sampling errors on one test set are taken as common: they add up with their signs, so a difference has what is left
    of both.  Those on a part of a finite set for each seed are taken as independent, which only widens a difference.
    Sums and differences are paired by seed, since equal seeds share data and split.  Finite values of one side are left
    out.  If those are more than half of a side, Welch-Satterthwaite applies, with the sampling errors of both sides.

    Attributes:
        values: The values by seed, if known.
        runs: The number of trained models, infinite for a number without training.
        sampling: The part of the standard error from finite test sets; `error` includes it.
        test: The name of the test set, if it is one for all seeds.
    """

    mean: float
    error: float
    freedom: float
    values: Mapping[Any, float] = field(default_factory=dict, compare=False)
    runs: float = math.inf
    sampling: float = 0.0
    finite: bool = False
    test: str = ""

    # ------------------------------------------------------------------------------------------------- arithmetic
    @classmethod
    def of(
        cls, values: Mapping[Any, float], sampling: float = 0.0, *, finite: bool = False, test: str = ""
    ) -> "Estimate":
        """Return the estimate from one value per seed; a value that is not finite makes the mean NaN.

        If every seed has its own test sequences, the spread over seeds includes `sampling`; otherwise it is added.

        Args:
            sampling: The standard error of the mean from finite test sets.
            finite: Whether the test sets are parts of one finite set, so that the spread has only a part of `sampling`.
            test: The name of the test set, if all seeds have one.
        """
        is_by_seed = isinstance(values, Mapping) and len(values) > 0
        if not is_by_seed or not all(isinstance(value, SupportsFloat) for value in values.values()):
            raise ValueError(f"Estimate: give a number for each seed, {{1: 0.9, 2: math.nan}}, got {values!r:.60}")
        count = len(values)
        mean = math.nan
        if all(map(math.isfinite, values.values())):
            mean = math.fsum(values.values()) / count
        if count == 1:
            return cls(mean, math.nan, 0.0, dict(values), 1.0, sampling, finite, test)
        squares = math.fsum((value - mean) ** 2 for value in values.values())
        variance_of_seeds = squares / (count - 1) / count
        if max(values.values()) - min(values.values()) < ROUNDING:
            variance_of_seeds = 0.0
        variance_of_test_set = 0.0
        if finite or test:
            variance_of_test_set = sampling**2
        # The error of a test set widens the interval; it is an estimate, too, and gives no degrees of freedom.
        error = math.sqrt(variance_of_seeds + variance_of_test_set)
        return cls(mean, error, count - 1.0, dict(values), float(count), sampling, finite, test)

    def __neg__(self) -> "Estimate":
        return self.scaled(-1.0)

    def __add__(self, other: "Estimate") -> "Estimate":
        sampling = math.hypot(self.sampling, other.sampling)
        values = {seed: value + other.values[seed] for seed, value in self.values.items() if seed in other.values}
        for seed, value in (*self.values.items(), *other.values.items()):
            if not math.isfinite(value):  # a network that diverged counts even without a partner
                values[seed] = math.nan
        if values and 2 * len(values) >= max(len(self.values), len(other.values)):
            test = ""
            if self.test and self.test == other.test:
                # The sampling errors are those of one test set: they add up with their signs.
                test = self.test
                sampling = self.sampling + other.sampling
            return Estimate.of(values, sampling, finite=self.finite or other.finite, test=test)

        mean = self.mean + other.mean
        runs = min(self.runs, other.runs)
        variance = self.error**2 + other.error**2
        if math.isnan(variance) or variance == 0:  # a single seed on either side, or two constants
            return Estimate(mean, math.sqrt(variance), self.freedom, runs=runs, sampling=sampling)
        # Welch-Satterthwaite: the degrees of freedom of a sum of independent estimates.
        weights = self.error**4 / max(self.freedom, 1e-9) + other.error**4 / max(other.freedom, 1e-9)
        freedom = variance**2 / weights if weights else math.inf
        return Estimate(mean, math.sqrt(variance), freedom, runs=runs, sampling=sampling)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return self + -other

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate times `factor`."""
        return replace(
            self,
            mean=factor * self.mean,
            error=abs(factor) * self.error,
            values={seed: factor * value for seed, value in self.values.items()},
            sampling=factor * self.sampling,
        )

    # ------------------------------------------------------------------------------------------------------ tests
    @property
    def by_seed(self) -> list[float]:
        """The values in the order of the seeds that were given."""
        return list(self.values.values())

    def above(self, margin: float) -> float:
        """Return the one-sided p-value of a mean above `margin`; 1 with a single seed."""
        if math.isnan(self.error) or self.freedom <= 0:
            return 1.0
        if self.error == 0:
            return float(self.mean - margin < ROUNDING)
        return float(student(self.freedom).sf((self.mean - margin) / self.error))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the two-sided interval by Student's t; infinite with a single seed."""
        if math.isnan(self.error) or self.freedom <= 0:
            return -math.inf, math.inf
        half = float(student(self.freedom).ppf((1 + confidence) / 2)) * self.error
        return self.mean - half, self.mean + half

    def as_json(self) -> dict[str, Any]:
        """Return mean, standard error (None for one seed) and values by seed as JSON values."""
        by_seed = dict(zip(map(str, self.values), self.by_seed, strict=True))
        return {"mean": self.mean, "standard_error": none_for_nan(self.error), "by_seed": by_seed}

    def __str__(self) -> str:
        if math.isnan(self.error):
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.error:.3f}"


# Model (a name of a paper's rows) -> its score.
Scores = Mapping[str, Estimate]


def none_for_nan(number: float) -> float | None:
    """Return a number as JSON has it: null for a number that does not exist."""
    if math.isnan(number):
        return None
    return number


def student(freedom: float) -> Any:
    """Return Student's t-distribution; the normal one for infinitely many degrees of freedom."""
    with optional("claims", "polyhead[report]"):
        from scipy import stats
    if math.isinf(freedom):
        return stats.norm()
    return stats.t(freedom)


def constant(value: float) -> Estimate:
    """Return a number without error."""
    return Estimate(value, 0.0, math.inf)


def over_networks(values: Mapping[Any, float], errors: Sequence[float], tasks: Iterable[Any], split: str) -> Estimate:
    """The mean score on `split` of networks, by seed, with the sampling error of finite test data.

    Args:
        errors: The standard error of each known score over its test sequences.
    """
    tasks = list({repr(task): task for task in tasks}.values())  # a user's task may have no hash
    # One test set for all seeds: its error stays, however many seeds there are.
    if all(task.shared(split) for task in tasks):
        test = f"{split} of {sorted(map(repr, tasks))}"
        return Estimate.of(values, math.fsum(errors) / len(errors), finite=True, test=test)
    finite = any(task.count(split) is not None for task in tasks)
    return Estimate.of(values, math.hypot(*errors) / len(errors), finite=finite)


def mean(estimates: Iterable[Estimate]) -> Estimate:
    """Return the mean of estimates."""
    terms = list(estimates)
    return functools.reduce(operator.add, terms).scaled(1 / len(terms))


# -------------------------------------------------------------------------------------------------------------- claims
@dataclass
class Part:
    """One number of a claim: `estimate` is above `margin`.

    Attributes:
        within: A smaller difference from the margin counts as none; 0 turns this test off.
        can_refute: Whether a number below the margin refutes the claim; False if no true value can be below the margin.
        is_equivalence: Whether the claim is that there is no difference from the margin.
        sides: 2 if the numbers themselves chose the direction.
        p_above: The p-value of a number above the margin, corrected by Holm.
        p_below: The p-value of a number below the margin, corrected by Holm.
        level_above: The level by Holm of the test behind `p_above`.
        level_below: The level by Holm of the test behind `p_below`.
    """

    name: str
    estimate: Estimate
    margin: float = 0.0
    within: float = 0.0
    can_refute: bool = True
    is_equivalence: bool = False
    sides: int = 1
    p_above: float = math.nan
    p_below: float = math.nan
    level_above: float = ALPHA
    level_below: float = ALPHA

    @property
    def is_tested(self) -> bool:
        """Whether there are enough seeds, a standard error, and a score of every run."""
        estimate = self.estimate
        return estimate.runs >= SEEDS and math.isfinite(estimate.mean) and not math.isnan(estimate.error)

    @property
    def verdict(self) -> str:
        """One of the words at the top of this file."""
        if not self.is_tested:
            return UNDECIDED
        # Two one-sided tests at `ALPHA`: the interval of 1 - 2 `ALPHA` lies near the margin.
        low, high = self.estimate.interval(1 - 2 * ALPHA)
        is_near = self.margin - self.within < low and high < self.margin + self.within
        if self.is_equivalence:
            if is_near:
                return YES
            if min(self.p_above, self.p_below) < ALPHA:
                return NO
            return UNDECIDED
        if self.p_above < ALPHA:
            return YES
        if self.p_below < ALPHA:
            return NO if self.can_refute else UNDECIDED
        if is_near:
            return NO_DIFFERENCE
        return UNDECIDED

    @property
    def confidence(self) -> float:
        """The confidence of the interval of the test in the direction of the mean."""
        verdict = self.verdict
        if verdict == NO_DIFFERENCE or (self.is_equivalence and verdict != NO):
            return 1 - 2 * ALPHA
        if self.estimate.mean < self.margin and (self.can_refute or self.is_equivalence):
            return 1 - 2 * self.level_below
        return 1 - 2 * self.level_above

    @property
    def difference(self) -> str:
        """Mean and standard error as text, with a sign."""
        if not math.isfinite(self.estimate.mean):
            return "a run without a finite score"
        size = str(self.estimate).lstrip("-")
        if self.estimate.mean >= 0:
            return f"+{size}"
        return f"−{size}"

    @property
    def interval(self) -> str:
        """The interval of its test as text; empty if it is not tested."""
        if not self.is_tested or not math.isfinite(self.estimate.mean):
            return ""
        low, high = self.estimate.interval(self.confidence)
        return f"{100 * self.confidence:.4g} % interval {low:+.3f} to {high:+.3f}".replace("-", "−")

    def __str__(self) -> str:
        if not math.isfinite(self.estimate.mean):
            return f"{self.name}, {self.difference}"
        return f"{self.name} {self.difference}, {self.interval}".removesuffix(", ")

    def as_json(self) -> dict[str, object]:
        """Return the numbers of the test as JSON values."""
        numbers = {
            "name": self.name,
            "outcome": self.verdict,
            "mean": self.estimate.mean,
            "margin": self.margin,
            "standard_error": none_for_nan(self.estimate.error),
            "sampling_error": abs(self.estimate.sampling),
            "interval": None,
            "confidence": self.confidence,
            "p": None,
            "corrected_p": none_for_nan(self.p_above),
            "runs": None,
        }
        if not math.isnan(self.estimate.error):
            numbers["interval"] = list(self.estimate.interval(self.confidence))
            numbers["p"] = self.estimate.above(self.margin)
        if math.isfinite(self.estimate.runs):
            numbers["runs"] = self.estimate.runs
        return numbers


@dataclass(frozen=True)
class Verdict:
    """A claim and its parts.  `family`: the claims whose p-values are corrected together."""

    claim: str
    parts: tuple[Part, ...]
    family: str = ""

    @property
    def outcome(self) -> str:
        """The verdict on the whole claim: see `all_of`."""
        return all_of(part.verdict for part in self.parts)

    def __str__(self) -> str:
        parts = []
        for part in self.parts:
            parts.append(f"{part}: {part.verdict}".removesuffix(f": {self.outcome}"))
        return f"{self.outcome}: {self.claim} ({'; '.join(parts)})"

    def to_dict(self) -> dict[str, object]:
        """Return the claim as JSON values for results.json."""
        return {"claim": self.claim, "outcome": self.outcome, "parts": list(map(Part.as_json, self.parts))}


def above(
    claim: str,
    parts: Mapping[str, Estimate],
    margin: float = 0.0,
    within: float | None = None,
    can_refute: bool = True,
    *,
    family: str = "",
) -> Verdict:
    """Return the claim that all of `parts` are above `margin`, judged alone.

    Args:
        within: For "no difference"; by default `WITHIN` if the margin is 0, else 0.
        can_refute: See `Part`.
        family: See `Verdict`.
    """
    if within is None:
        within = WITHIN
        if margin:
            within = 0.0
    tested = []
    for name, estimate in parts.items():
        tested.append(Part(name, estimate, margin, within, can_refute))
    return judge([Verdict(claim, tuple(tested), family)])[0]


def no_difference(claim: str, parts: Mapping[str, Estimate], *, family: str = "") -> Verdict:
    """Return the claim that all of `parts` are 0, judged alone; less than `WITHIN` counts as 0."""
    tested = []
    for name, estimate in parts.items():
        # Either direction refutes the claim, so the numbers choose it.
        tested.append(Part(name, estimate, within=WITHIN, is_equivalence=True, sides=2))
    return judge([Verdict(claim, tuple(tested), family)])[0]


def judge(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Return the same claims, their p-values corrected by Holm together with those of their family."""
    judged = []
    families: dict[str, list[Part]] = {}
    for verdict in verdicts:
        parts = tuple(map(replace, verdict.parts))  # copies
        judged.append(replace(verdict, parts=parts))
        for part in parts:
            if part.is_tested:
                families.setdefault(verdict.family, []).append(part)
    for family in families.values():
        p_above = []
        p_below = []
        for part in family:
            p_above.append(min(part.sides * part.estimate.above(part.margin), 1.0))
            p_below.append(min(part.sides * (-part.estimate).above(-part.margin), 1.0))
        levels_above, levels_below = holm_levels(p_above), holm_levels(p_below)
        corrected_above, corrected_below = holm(p_above), holm(p_below)
        for i, part in enumerate(family):
            part.p_above, part.p_below = corrected_above[i], corrected_below[i]
            part.level_above, part.level_below = levels_above[i] / part.sides, levels_below[i] / part.sides
    return tuple(judged)


def holm(values: Sequence[float]) -> list[float]:
    """P-values corrected by Holm: of n, the smallest times n, the next times n - 1 and so on, made non-decreasing.

    >>> holm([0.04, 0.01])
    [0.04, 0.02]
    """
    if not all(0 <= value <= 1 for value in values):  # NaN has no place in an order
        raise ValueError(f"holm: p-values must be from 0 to 1 but are {list(values)!r:.60}")
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        # A larger value never gets a smaller result than the one before it.
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def holm_levels(p_values: Sequence[float]) -> list[float]:
    """Return the level at which Holm tests each p-value.

    Of n p-values the smallest is tested at `0.05 / n`, the next at `0.05 / (n - 1)`, and so on.
    From the first that is not below its level, all others are tested at that level.

    >>> holm_levels([0.2, 0.001, 0.04])
    [0.025, 0.016666666666666666, 0.025]
    """
    num_passed = sum(value < ALPHA for value in holm(p_values))
    levels = [ALPHA] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        levels[i] = ALPHA / (len(p_values) - min(rank, num_passed))
    return levels


def all_of(verdicts: Iterable[str]) -> str:
    """Return the verdict on a claim: "no" if any part has it, the common verdict if all agree, else undecided."""
    distinct = set(verdicts)
    if NO in distinct:
        return NO
    if len(distinct) == 1:
        return distinct.pop()
    return UNDECIDED
