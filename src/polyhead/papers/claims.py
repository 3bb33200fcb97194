"""Claims of papers as statistical tests on measured scores.

A claim is written before any result is known, as "each of these numbers is above its margin".  A number has one value
per seed; over several settings, the mean is taken for each seed.  Each number is a *part* with a verdict:

    holds                 its one-sided p-value (Student's t over seeds), corrected by Holm over all parts of the page,
                          is below 0.05
    does not hold         the same test in the other direction passes
    no difference         its two-sided 90 % interval lies within `within` of the margin: two one-sided tests at 0.05
    not enough evidence   none of these
    not a test            fewer than five seeds, or a run without a finite score

The claim holds if all its parts hold.  It does not hold if one part does not hold.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from polyhead.papers.estimates import LEVEL, Estimate
from polyhead.spec.numbers import holm

HOLDS, FAILS, EQUAL, OPEN = "holds", "does not hold", "no difference", "not enough evidence"
NO_TEST = "not a test"
SEEDS = 5
"""The least number of seeds for a test."""
WITHIN = 0.02
"""A smaller difference between scores (fractions) counts as none.  For logarithms this is two per cent."""


@dataclass(frozen=True)
class Part:
    """One number of a claim: `estimate` is above `margin`.

    `up`, `down`: the corrected p-values of "above" and of "below".  `within`: a smaller difference from the margin
    counts as none; 0 turns this test off.  `falls`: whether a number below the margin refutes the claim; False for a
    number whose true value cannot be below the margin.
    """

    name: str
    estimate: Estimate
    margin: float = 0.0
    within: float = 0.0
    falls: bool = True
    up: float = math.nan
    down: float = math.nan

    @property
    def tested(self) -> bool:
        """Whether there are enough seeds and a standard error."""
        return self.estimate.runs >= SEEDS and not math.isnan(self.estimate.error)

    @property
    def outcome(self) -> str:
        """The verdict, in the words at the top of this file."""
        if not self.tested:
            return NO_TEST
        if self.up < 1 - LEVEL:
            return HOLDS
        if self.down < 1 - LEVEL:
            return FAILS if self.falls else OPEN
        low, high = self.estimate.interval(1 - 2 * (1 - LEVEL))
        return EQUAL if self.margin - self.within < low and high < self.margin + self.within else OPEN

    def __str__(self) -> str:
        if not math.isfinite(self.estimate.mean):
            return f"{self.name}, a run without a finite score"
        sign = "+" if self.estimate.mean >= 0 else "−"
        low, high = (f"{'+' if end >= 0 else '−'}{abs(end):.3f}" for end in self.estimate.interval())
        interval = "" if math.isnan(self.estimate.error) else f", 95 % interval {low} to {high}"
        return f"{self.name} {sign}{str(self.estimate).lstrip('-')}{interval}"


@dataclass(frozen=True)
class Verdict:
    """A claim and its parts.

    `printed`: the same numbers as printed in the paper.  `family`: the claims whose p-values are corrected together.
    """

    claim: str
    parts: tuple[Part, ...]
    printed: str | None = None
    family: str = ""

    @property
    def outcome(self) -> str:
        """The outcome of the whole claim: see `all_of`."""
        return all_of(part.outcome for part in self.parts)

    @property
    def evidence(self) -> str:
        """Its numbers in one line, with the outcome of each part if they differ."""
        if len({part.outcome for part in self.parts}) == 1:
            return "; ".join(map(str, self.parts))
        return "; ".join(f"{part}: {part.outcome}" for part in self.parts)

    def __str__(self) -> str:
        return f"{self.outcome}: {self.claim} ({self.evidence})"

    def to_dict(self) -> dict[str, object]:
        """As JSON values for results.json."""
        return {
            "claim": self.claim,
            "outcome": self.outcome,
            "evidence": self.evidence,
            "printed": self.printed,
            "parts": [_row(part) for part in self.parts],
        }


def _row(part: Part) -> dict[str, object]:
    known = not math.isnan(part.estimate.error)
    return {
        "name": part.name,
        "outcome": part.outcome,
        "mean": part.estimate.mean,
        "margin": part.margin,
        "standard_error": part.estimate.error if known else None,
        "sampling_error": abs(part.estimate.sampling),
        "interval": list(part.estimate.interval()) if known else None,
        "p": part.estimate.above(part.margin) if known else None,
        "corrected_p": None if math.isnan(part.up) else part.up,
        "runs": None if math.isinf(part.estimate.runs) else part.estimate.runs,
    }


def above(
    claim: str,
    parts: Mapping[str, Estimate],
    margin: float = 0.0,
    printed: Mapping[str, Estimate] | None = None,
    within: float | None = None,
    falls: bool = True,
    *,
    family: str = "",
) -> Verdict:
    """The claim that all of `parts` are above `margin`.

    `printed`: the same numbers as printed in the paper.  `within`: for "no difference"; by default `WITHIN` if the
    margin is 0.  `falls`: see `Part`; `family`: see `Verdict`.
    """
    small = (0.0 if margin else WITHIN) if within is None else within
    own = "; ".join(str(Part(name, part, margin)) for name, part in printed.items()) if printed else None
    verdict = Verdict(claim, tuple(Part(name, part, margin, small, falls) for name, part in parts.items()), own, family)
    return judged([verdict])[0]


def judged(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The same claims with the p-values of their parts corrected by Holm, together with those of their family."""
    parts = [list(verdict.parts) for verdict in verdicts]
    families: dict[str, list[tuple[int, int]]] = {}
    for i, verdict in enumerate(verdicts):
        families.setdefault(verdict.family, []).extend((i, j) for j, part in enumerate(verdict.parts) if part.tested)
    for places in families.values():
        tested = [parts[i][j] for i, j in places]
        up = holm([part.estimate.above(part.margin) for part in tested])
        down = holm([(-part.estimate).above(-part.margin) for part in tested])
        for n, (i, j) in enumerate(places):
            parts[i][j] = replace(parts[i][j], up=up[n], down=down[n])
    return tuple(replace(verdict, parts=tuple(own)) for verdict, own in zip(verdicts, parts, strict=True))


def all_of(outcomes: Iterable[str]) -> str:
    """The outcome of a claim: "does not hold" or "not a test" if any part has it, else the common outcome."""
    found = set(outcomes)
    for one in (FAILS, NO_TEST):
        if one in found:
            return one
    return found.pop() if len(found) == 1 else OPEN
