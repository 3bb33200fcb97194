"""What Schug et al. 2024 claim, as tests on measured scores: holds, does not hold, or not enough evidence.

A claim is turned into "this number is above that margin" beforehand; it holds if the lower end of the number's 95 %
interval (one-sided, Student's t over seeds) is above the margin, does not hold if the upper end is below (of a claim
with several parts at a level that allows for their number), and otherwise there is not enough evidence.  Where the
paper prints the numbers (Table A1), the same test is put to them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyhead.papers.hyla.rows import ROWS
from polyhead.spec.optional import optional

HOLDS, FAILS, OPEN = "holds", "does not hold", "not enough evidence"
LEVEL = 0.95

TABLE_A2 = {(4, 4): (0.0642, 0.0038), (4, 8): (0.0032, 0.0009), (4, 16): (0.0005, 0.0003)}
"""(features, values) -> the paper's fraction of ambiguous instances of 4096 and its standard error."""


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


def _signed(estimate: Estimate) -> str:
    return f"{'+' if estimate.mean >= 0 else '−'}{str(estimate).lstrip('-')}"


def above(claim: str, parts: Mapping[str, Estimate], margin: float = 0.0, printed: str | None = None) -> Verdict:
    """All of `parts` are above `margin`."""
    evidence = "; ".join(f"{name} {_signed(part)}" for name, part in parts.items())
    outcome = all_of(decide(part, margin, len(parts)) for part in parts.values())
    return Verdict(claim, outcome, evidence, printed)


Scores = Mapping[str, Estimate]
"""Model (a name of `recipes.rows`) -> its score."""


# ------------------------------------------------------------------------------------------------------------ Table A1
_A1: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("HYLA is better on unseen combinations than softmax and linear", (("hyla", "softmax"), ("hyla", "linear"))),
    ("the nonlinearity and RMSHead are both needed", (("hyla", "hyla-linear"), ("hyla", "hyla-norms"))),
    ("RMSHead alone helps linear attention", (("linear-rms", "linear"),)),
    ("a softmax in place of RMSHead is worse", (("hyla", "hyla-softmax"),)),
    ("a deeper value network is strong too: better than softmax", (("hyla-deep", "softmax"),)),
    (
        "mixture of experts helps each kind of heads",
        (("softmax-moe", "softmax"), ("linear-moe", "linear"), ("hyla-moe", "hyla")),
    ),
)  # fmt: skip


def table_a1(task: str, measured: Scores) -> list[Verdict]:
    """The claims about Table A1 on `task` ("fuzzy" or "sraven"); claims whose models were not run are left out."""
    verdicts = []
    for claim, pairs in _A1:
        if not all(name in measured for pair in pairs for name in pair):
            continue
        parts = {f"{ROWS[a].label} over {ROWS[b].label}": measured[a] - measured[b] for a, b in pairs}
        own = all_of(decide(printed(task, a) - printed(task, b), parts=len(pairs)) for a, b in pairs)
        verdicts.append(above(f"{claim} ({task})", parts, printed=own))
    return verdicts


def printed(task: str, name: str) -> Estimate:
    """The paper's number for a model of Table A1, as a fraction."""
    value = getattr(ROWS[name], task)
    assert value is not None
    return Estimate.printed(value[0] / 100, value[1] / 100)


# -------------------------------------------------------------------------------------------------------- fuzzy figures
def fig_2c(scores: Mapping[tuple[int, float], Scores]) -> list[Verdict]:
    """`scores[length, held_out]`: compositional R².  HYLA loses less than the others as more is held out."""
    lengths = sorted({length for length, _ in scores})
    few, many = min(h for _, h in scores), max(h for _, h in scores)
    models = sorted(set.intersection(*(set(cell) for cell in scores.values())))
    drop = {m: mean([scores[n, few][m] - scores[n, many][m] for n in lengths]) for m in models}
    claim = f"HYLA suffers less when {100 * many:.0f} % are held out in place of {100 * few:.0f} %"
    if "hyla" not in drop:
        return []
    others = {f"loss of {ROWS[m].label} over HYLA's": drop[m] - drop["hyla"] for m in models if m != "hyla"}
    return [above(claim, others)]


def small_gaps(iid: Scores, compositional: Scores) -> list[Verdict]:
    """In distribution the models differ less than on unseen combinations."""
    parts = {}
    for name in sorted(set(iid) - {"hyla"}) if "hyla" in iid else ():
        outside, inside = compositional["hyla"] - compositional[name], iid["hyla"] - iid[name]
        parts[f"gap to {ROWS[name].label}, outside − inside"] = _size(outside) - _size(inside)
    claim = "in-distribution gaps between the models are smaller than those on unseen combinations"
    return [above(claim, parts)] if parts else []


def _size(estimate: Estimate) -> Estimate:
    """Its absolute value, with the sign of the mean for all seeds."""
    return estimate if estimate.mean >= 0 else -estimate


def novel(where: str, scores: Scores, floor: Estimate) -> list[Verdict]:
    """Nobody solves combinations of unknown terms: at `where` all are below a floor that composes nothing."""
    parts = {f"floor {floor} − {ROWS[m].label}": floor - e for m, e in scores.items()}
    claim = f"no model solves combinations of unknown terms: a Gaussian process is better ({where})"
    return [above(claim, parts)]


# -------------------------------------------------------------------------------------------------------------- SRAVEN
def solves(scores: Mapping[Any, Scores], level: float = 0.8) -> list[Verdict]:
    """At the largest setting all models reach `level`; at the smallest HYLA is best."""
    settings = list(scores)
    largest, least = scores[settings[-1]], scores[settings[0]]
    up = {f"{ROWS[m].label} at the largest": e for m, e in largest.items()}
    first = above(f"at the largest setting that was run all models solve {100 * level:.0f} %", up, level)
    if "hyla" not in least:
        return [first]
    ahead = {f"HYLA over {ROWS[m].label}": least["hyla"] - e for m, e in least.items() if m != "hyla"}
    return [first, above("at the smallest setting that was run HYLA is best", ahead)]


def heads(scores: Mapping[int, Scores]) -> list[Verdict]:
    """A single head is worse than the next larger number."""
    counts = sorted(scores)
    if counts[0] != 1:  # its runs failed: nothing else speaks for them
        return []
    few, more = scores[counts[0]], scores[counts[1]]
    parts = {f"{ROWS[m].label}, {counts[1]} heads over {counts[0]}": more[m] - few[m] for m in few if m in more}
    return [above("a single head hurts", parts)]


def harder(scores: Mapping[Any, Scores], what: str) -> list[Verdict]:
    """The score falls from the least to the largest value of `what`."""
    points = sorted(scores)
    first, last = scores[points[0]], scores[points[-1]]
    parts = {f"{ROWS[m].label}, {points[0]:g} over {points[-1]:g}": first[m] - last[m] for m in first if m in last}
    return [above(f"SRAVEN gets harder with {what}", parts)]


# --------------------------------------------------------------------------------------------------------------- codes
def decodable(what: str, scores: Mapping[str, Estimate], chance: Mapping[str, Estimate]) -> list[Verdict]:
    """`scores[model]`: macro F1 of the last layer on unseen tasks, over that layer's chance level, which is another for
    every seed, as its unseen tasks are."""
    parts = {f"{name} (chance {chance[name].mean:.3f})": e - chance[name] for name, e in scores.items()}
    return [above(f"{what} can be decoded from the latent code on unseen tasks", parts)]


def order_of_layers(rule: Mapping[str, Estimate], magnitude: Mapping[str, Estimate]) -> list[Verdict]:
    """`rule[model]`: purity by rule of the last layer less that of the first; `magnitude[model]`: the first layer less
    the last."""
    parts = {f"rule, {m}, last − first": e for m, e in rule.items()}
    parts |= {f"magnitude, {m}, first − last": e for m, e in magnitude.items()}
    return [above("early layers cluster by magnitude, late ones by rule", parts)]


def shared_code(difference: Estimate) -> list[Verdict]:
    """`difference`: cosine of the mean codes of sum and difference, less the mean over all other pairs of rules."""
    part = {"cosine of sum and difference over the mean of other pairs": difference}
    return [above("sum and difference share a code", part)]


def ambiguity(name: str, fraction: float, count: int, most: float = 0.005) -> Verdict:
    """The fraction of ambiguous instances is below half a percent, by a definition called `name`."""
    error = math.sqrt(max(fraction * (1 - fraction), 1 / count) / count)
    part = Estimate(most - fraction, error, math.inf)
    claim = f"at M 4, K 8 fewer than half a percent of the instances are ambiguous, by {name}"
    return Verdict(claim, decide(part), f"{100 * fraction:.2f} % ± {100 * error:.2f} % of {count}")


def constant(value: float) -> Estimate:
    """A number without error."""
    return Estimate(value, 0.0, math.inf)


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Their mean."""
    total = estimates[0]
    for one in estimates[1:]:
        total = total + one
    return total.scaled(1 / len(estimates))
