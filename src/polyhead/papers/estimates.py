"""Measured scores with their errors: means over seeds, differences seed by seed, intervals by Student's t."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from polyhead.spec.optional import optional

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and degrees of freedom; `values`: by seed, if known.

    `runs`: the number of trained models, infinite for a number without training.  `sampling`: the part of the standard
    error from finite test sets; `error` includes it.  `test`: the name of the test set, if it is one for all seeds.
    Sampling errors on one test set are taken as common: they add up with their signs, so a difference has what is left
    of both.  Sums and differences are paired by seed if both sides have the same seeds (equal seeds share data and
    split); otherwise by Welch-Satterthwaite, where the sampling errors of both sides count.
    """

    mean: float
    error: float
    freedom: float
    values: Mapping[int, float] = field(default_factory=dict, compare=False)
    runs: float = math.inf
    sampling: float = 0.0
    finite: bool = False
    test: str = ""

    @classmethod
    def of(
        cls, values: Mapping[int, float], sampling: float = 0.0, *, finite: bool = False, test: str = ""
    ) -> "Estimate":
        """The estimate from one value per seed.

        `sampling`: the standard error of the mean from finite test sets.  If every seed has its own test sequences, the
        spread over seeds includes it.  If the test sets are parts of one `finite` set, the spread includes only a part
        of it, so it is added; so it is if all seeds have one test set, called `test`.
        """
        if not values:
            raise ValueError("Estimate: at least one value is needed but none came")
        n, mean = len(values), math.fsum(values.values()) / len(values)
        if n == 1:
            return cls(mean, math.nan, 0.0, dict(values), 1.0, sampling, finite, test)
        spread = math.fsum((value - mean) ** 2 for value in values.values()) / (n - 1) / n
        more = sampling**2 if finite else 0.0
        freedom = (n - 1) * (1 + more / spread) ** 2 if spread > 0 else math.inf if more else n - 1.0
        return cls(mean, math.sqrt(spread + more), freedom, dict(values), float(n), sampling, finite, test)

    @classmethod
    def printed(cls, mean: float, error: float, seeds: int = 3) -> "Estimate":
        """A mean and standard error as a paper gives them."""
        return cls(mean, error, float(seeds - 1), runs=float(seeds))

    def __neg__(self) -> "Estimate":
        return self.scaled(-1.0)

    def __abs__(self) -> "Estimate":
        """The absolute value: all seeds get the sign of the mean."""
        return self if self.mean >= 0 else -self

    def __add__(self, other: "Estimate") -> "Estimate":
        runs, sampling = min(self.runs, other.runs), math.hypot(self.sampling, other.sampling)
        if self.values and self.values.keys() == other.values.keys():
            values = {seed: value + other.values[seed] for seed, value in self.values.items()}
            test = self.test if self.test == other.test else ""
            sampling = self.sampling + other.sampling if test else sampling
            return Estimate.of(values, sampling, finite=self.finite or other.finite, test=test)
        parts = [(e.error**2, e.freedom) for e in (self, other)]
        total = math.fsum(part for part, _ in parts)
        if not total > 0:  # also nan, from a single seed on either side
            error = math.nan if math.isnan(total) else 0.0
            return Estimate(self.mean + other.mean, error, self.freedom, runs=runs, sampling=sampling)
        own = math.fsum(part**2 / max(n, 1e-9) for part, n in parts)
        freedom = total**2 / own if own else math.inf  # 0 where only sampling errors are left
        return Estimate(self.mean + other.mean, math.sqrt(total), freedom, runs=runs, sampling=sampling)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return self + -other

    def scaled(self, by: float) -> "Estimate":
        """The estimate times `by`."""
        values = {seed: by * value for seed, value in self.values.items()}
        return replace(
            self, mean=by * self.mean, error=abs(by) * self.error, values=values, sampling=by * self.sampling
        )

    def above(self, margin: float) -> float:
        """The one-sided p-value of a mean above `margin`; 1 with a single seed."""
        if math.isnan(self.error) or self.freedom <= 0:
            return 1.0
        if self.error == 0:
            return float(self.mean <= margin)
        return _beyond((self.mean - margin) / self.error, self.freedom)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The two-sided interval by Student's t; infinite with a single seed."""
        if math.isnan(self.error) or self.freedom <= 0:
            return -math.inf, math.inf
        half = _quantile((1 + level) / 2, self.freedom) * self.error
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.3f}"
        return f"{self.mean:.3f}{error}"


Scores = Mapping[str, Estimate]
"""Model (a name of a paper's rows) -> its score."""


def _beyond(statistic: float, freedom: float) -> float:
    """The probability of a larger Student's t."""
    with optional("claims", "polyhead[report]"):
        from scipy.special import stdtr
    return float(stdtr(freedom, -statistic))


def _quantile(level: float, freedom: float) -> float:
    with optional("claims", "polyhead[report]"):
        from scipy.special import stdtrit
    return float(stdtrit(freedom, level))


def constant(value: float) -> Estimate:
    """A number without error."""
    return Estimate(value, 0.0, math.inf)


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of estimates."""
    total = estimates[0]
    for one in estimates[1:]:
        total = total + one
    return total.scaled(1 / len(estimates))
