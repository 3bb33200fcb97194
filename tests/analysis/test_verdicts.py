"""Verdicts on differences over trained networks, against SciPy's tests and by hand."""

import math

import pytest
import scipy.stats

from polyhead.analysis.verdicts import NO, NO_DIFFERENCE, UNDECIDED, YES, difference, judge

HYLA = {1: 0.93, 2: 0.87, 3: 0.91, 4: 0.89, 5: 0.90}
SOFTMAX = {1: 0.75, 2: 0.70, 3: 0.77, 4: 0.74, 5: 0.69}


def test_equal_seeds_are_paired():
    test = scipy.stats.ttest_rel(list(HYLA.values()), list(SOFTMAX.values()), alternative="greater")
    interval = scipy.stats.ttest_rel(list(HYLA.values()), list(SOFTMAX.values())).confidence_interval(0.9)
    found = difference(HYLA, SOFTMAX)
    assert found.p_above == pytest.approx(test.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_other_seeds_are_compared_by_welch():
    other = {seed + 9: value for seed, value in SOFTMAX.items()}
    test = scipy.stats.ttest_ind(list(HYLA.values()), list(SOFTMAX.values()), equal_var=False, alternative="greater")
    assert difference(HYLA, other).p_above == pytest.approx(test.pvalue)


def test_a_number_without_error_is_compared_by_a_test_of_one_sample():
    test = scipy.stats.ttest_1samp(list(HYLA.values()), 0.85, alternative="greater")
    assert difference(HYLA, 0.85).p_above == pytest.approx(test.pvalue)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (HYLA, SOFTMAX, YES),
        (SOFTMAX, HYLA, NO),
        (HYLA, {seed: value + 0.001 * (seed - 3) for seed, value in HYLA.items()}, NO_DIFFERENCE),
        (HYLA, {seed: value + 0.2 * (seed - 3) for seed, value in HYLA.items()}, UNDECIDED),
        ({1: 0.9, 2: 0.91}, {1: 0.1, 2: 0.12}, UNDECIDED),  # too few networks, however far apart
        (dict.fromkeys(range(5), 1.0), dict.fromkeys(range(5), 1.0), NO_DIFFERENCE),  # always right, both
    ],
)
def test_verdicts(first, second, verdict):
    assert judge([difference(first, second)])[0].verdict == verdict


def test_one_network_has_no_interval():
    found = difference({1: 0.9}, {1: 0.5})
    assert (found.mean, found.low, found.high) == (0.4, -math.inf, math.inf)
    assert judge([found])[0].p is None


def test_tests_of_one_table_are_corrected_for_one_another():
    ahead = difference(HYLA, {seed: value - 0.08 + 0.064 * (seed % 2) for seed, value in HYLA.items()})
    assert 0.01 < ahead.p_above < 0.05
    assert judge([ahead])[0].verdict == YES
    assert [one.verdict for one in judge([ahead] * 8)] == [UNDECIDED] * 8
