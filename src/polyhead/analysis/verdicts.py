"""Is one mean above another?  Differences over trained networks, their intervals, and the four verdict words.

    yes              the one-sided test "above 0" (Student's t over networks) has p < 0.05, corrected by Holm
    no               the same test in the other direction passes
    no difference    the interval lies within `EQUAL_WITHIN` of 0: two one-sided tests at 0.05
    undecided        none of these, or fewer than `MIN_NETWORKS` networks

The interval beside a verdict is that of its test: its ends are where the one-sided tests at 0.05 turn, so it holds the
true difference with a probability of 90 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from polyhead.spec.numbers import holm
from polyhead.spec.optional import optional

YES, NO, NO_DIFFERENCE, UNDECIDED = "yes", "no", "no difference", "undecided"
VERDICTS = (YES, NO, NO_DIFFERENCE, UNDECIDED)
SIGNIFICANCE = 0.05
# The least number of trained networks on each side of a test.
MIN_NETWORKS = 5
# A smaller difference between scores (shares of 1) counts as none.
EQUAL_WITHIN = 0.02
# A spread that is only rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Difference:
    """A mean difference with its interval, and the one-sided p-values of "above 0" and "below 0".

    `num_networks`: of the side with fewer.  Without a second network on each side the interval is infinite, p is 1.
    """

    mean: float
    low: float
    high: float
    p_above: float
    p_below: float
    num_networks: int


def difference(first: Mapping[int, float], second: Mapping[int, float] | float) -> Difference:
    """The mean of `first` minus that of `second`, both by seed; `second` may be a number without an error.

    Equal seeds share data and split: the test is paired if both sides have the same seeds, otherwise it is Welch's.
    """
    with optional("verdicts", "polyhead[report]"):
        from scipy import stats

    if isinstance(second, Mapping) and second.keys() != first.keys():
        sides = [list(first.values()), list(second.values())]
        mean = fmean(sides[0]) - fmean(sides[1])
    else:
        other = dict.fromkeys(first, second) if isinstance(second, float) else second
        sides = [[value - other[seed] for seed, value in first.items()]]
        mean = fmean(sides[0])
    num_networks = min(map(len, sides))
    if num_networks < 2:
        return Difference(mean, -math.inf, math.inf, 1.0, 1.0, num_networks)
    if max(max(values) - min(values) for values in sides) < ROUNDING:  # all networks alike
        return Difference(mean, mean, mean, float(mean <= 0), float(mean >= 0), num_networks)

    # The ends of the interval are where the one-sided tests turn.
    if len(sides) == 2:
        test = stats.ttest_ind(*sides, equal_var=False)
    else:
        test = stats.ttest_1samp(sides[0], 0.0)
    low, high = map(float, test.confidence_interval(1 - 2 * SIGNIFICANCE))
    p_above = float(stats.t.sf(test.statistic, test.df))
    return Difference(mean, low, high, p_above, 1 - p_above, num_networks)


@dataclass(frozen=True)
class Judged:
    """A difference with its p-value ("above 0", corrected by Holm) and verdict; p is None where nothing is tested."""

    difference: Difference
    p: float | None
    verdict: str


def judge(differences: Sequence[Difference]) -> list[Judged]:
    """The verdicts on differences that belong together: their p-values are corrected for one another."""
    tested = [measured for measured in differences if measured.num_networks >= MIN_NETWORKS]
    above = iter(holm([measured.p_above for measured in tested]))
    below = iter(holm([measured.p_below for measured in tested]))
    results = []
    for measured in differences:
        if measured.num_networks < MIN_NETWORKS:
            results.append(Judged(measured, None, UNDECIDED))
            continue
        p_above, p_below = next(above), next(below)
        if p_above < SIGNIFICANCE:
            verdict = YES
        elif p_below < SIGNIFICANCE:
            verdict = NO
        elif max(-measured.low, measured.high) < EQUAL_WITHIN:
            verdict = NO_DIFFERENCE
        else:
            verdict = UNDECIDED
        results.append(Judged(measured, p_above, verdict))
    return results
