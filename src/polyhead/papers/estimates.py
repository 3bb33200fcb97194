"""What papers claim, as tests on measured scores: holds, does not hold, or not enough evidence.

A claim is turned into "this number is above that margin" beforehand.  It holds if the lower end of the number's 95 %
interval (one-sided, Student's t over seeds) is above the margin.  It does not hold if the upper end is below; of a
claim with several parts this is asked at a level that allows for their number.  Otherwise there is not enough evidence.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polyhead.spec.optional import optional

HOLDS, FAILS, OPEN = "holds", "does not hold", "not enough evidence"
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and the degrees of freedom of that; `values` by seed where they are known.

    Sums and differences are taken seed by seed where both sides have the same seeds (seeds share data and split), by
    Welch-Satterthwaite otherwise.
    """

    mean: float
    error: float
    freedom: float
    values: Mapping[int, float] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, values: Mapping[int, float]) -> "Estimate":
        """Of one value per seed."""
        if not values:
            raise ValueError("Estimate: at least one value is needed but none came")
        n, mean = len(values), math.fsum(values.values()) / len(values)
        square = math.fsum((value - mean) ** 2 for value in values.values())
        return cls(mean, math.sqrt(square / (n - 1) / n) if n > 1 else math.nan, float(n - 1), dict(values))

    @classmethod
    def printed(cls, mean: float, error: float, seeds: int = 3) -> "Estimate":
        """A mean and standard error as a paper gives them."""
        return cls(mean, error, float(seeds - 1))

    def __neg__(self) -> "Estimate":
        return Estimate(-self.mean, self.error, self.freedom, {seed: -value for seed, value in self.values.items()})

    def __add__(self, other: "Estimate") -> "Estimate":
        if self.values and self.values.keys() == other.values.keys():
            return Estimate.of({seed: value + other.values[seed] for seed, value in self.values.items()})
        parts = [(e.error**2, e.freedom) for e in (self, other)]
        total = math.fsum(part for part, _ in parts)
        if not total > 0:  # also nan: a single seed on either side
            return Estimate(self.mean + other.mean, math.nan if math.isnan(total) else 0.0, self.freedom)
        freedom = total**2 / math.fsum(part**2 / max(n, 1e-9) for part, n in parts)
        return Estimate(self.mean + other.mean, math.sqrt(total), freedom)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return self + -other

    def scaled(self, by: float) -> "Estimate":
        """`by` times it."""
        values = {seed: by * value for seed, value in self.values.items()}
        return Estimate(by * self.mean, abs(by) * self.error, self.freedom, values)

    def bound(self, level: float = LEVEL) -> float:
        """How far the mean may be off, to one side, with that confidence; infinite with a single seed."""
        if self.freedom <= 0 or math.isnan(self.error):
            return math.inf
        with optional("claims", "polyhead[report]"):
            from scipy.stats import t

        return float(t.ppf(level, self.freedom)) * self.error

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.3f}"
        return f"{self.mean:.3f}{error}"


Scores = Mapping[str, Estimate]
"""Model (a name of a paper's rows) -> its score."""


@dataclass(frozen=True)
class Verdict:
    """A claim, what came of it, the numbers it rests on, and the same test on the paper's own numbers (`printed`)."""

    claim: str
    outcome: str
    evidence: str
    printed: str | None = None

    def __str__(self) -> str:
        return f"{self.outcome}: {self.claim} ({self.evidence})"


def decide(estimate: Estimate, margin: float = 0.0, parts: int = 1) -> str:
    """Is it above `margin`?  As one of `parts` of a claim, any of which can bring it down, it fails only by the bound
    of level 1 - 0.05 / parts (Bonferroni); that all must hold is strict enough as it is."""
    if estimate.mean - estimate.bound() > margin:
        return HOLDS
    return FAILS if estimate.mean + estimate.bound(1 - (1 - LEVEL) / parts) < margin else OPEN


def all_of(outcomes: Iterable[str]) -> str:
    """A claim with several parts holds when all hold and falls with any."""
    found = list(outcomes)
    return FAILS if FAILS in found else HOLDS if found and set(found) == {HOLDS} else OPEN


def above(claim: str, parts: Mapping[str, Estimate], margin: float = 0.0, printed: str | None = None) -> Verdict:
    """All of `parts` are above `margin`."""
    evidence = "; ".join(f"{name} {_signed(part)}" for name, part in parts.items())
    outcome = all_of(decide(part, margin, len(parts)) for part in parts.values())
    return Verdict(claim, outcome, evidence, printed)


def _signed(estimate: Estimate) -> str:
    return f"{'+' if estimate.mean >= 0 else '−'}{str(estimate).lstrip('-')}"


def constant(value: float) -> Estimate:
    """A number without error."""
    return Estimate(value, 0.0, math.inf)


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Their mean."""
    total = estimates[0]
    for one in estimates[1:]:
        total = total + one
    return total.scaled(1 / len(estimates))
