"""Estimates, tests and verdicts: against scipy, and on planted numbers."""

import math

import pandas
import pytest
import scipy.stats

from polyhead.analysis import claims as estimates
from polyhead.analysis.claims import NO, NO_DIFFERENCE, UNDECIDED, YES, Estimate, above, all_of, holm, no_difference
from polyhead.papers.hyla import counts, fuzzy, probes, scaling, tables
from polyhead.papers.outcome import FigureOutcome

A, B = {0: 0.61, 1: 0.74, 2: 0.66}, {0: 0.55, 1: 0.69, 2: 0.58}


def test_differences_are_seed_by_seed_where_seeds_are_shared():
    difference = Estimate.of(A) - Estimate.of(B)
    expected = scipy.stats.ttest_rel(list(A.values()), list(B.values()))
    assert difference.mean / difference.error == pytest.approx(expected.statistic)
    assert difference.freedom == expected.df
    assert difference.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    greater = scipy.stats.ttest_rel(list(A.values()), [b + 0.01 for b in B.values()], alternative="greater")
    assert difference.above(0.01) == pytest.approx(greater.pvalue)


def test_differences_are_welchs_where_seeds_differ_and_of_one_sample_from_a_number():
    difference = Estimate.of(A) - Estimate.of({seed + 5: value for seed, value in B.items()})
    expected = scipy.stats.ttest_ind(list(A.values()), list(B.values()), equal_var=False)
    assert difference.mean / difference.error == pytest.approx(expected.statistic)
    assert difference.freedom == pytest.approx(expected.df)
    six = Estimate.of(A | {3: 0.9}) - Estimate.of(B)  # one seed more on a side: the others stay pairs
    assert six == Estimate.of(A) - Estimate.of(B)
    one_sample = scipy.stats.ttest_1samp(list(A.values()), 0.6, alternative="greater")
    assert (Estimate.of(A) - estimates.constant(0.6)).above(0.0) == pytest.approx(one_sample.pvalue)


def test_equal_scores_on_a_finite_test_set_leave_its_sampling_error():
    """Beside unequal ones it counts, too: test_redraw.py has images."""
    difference = estimates.constant(0.9) - Estimate.of(dict.fromkeys(range(5), 0.95), 0.01, finite=True)
    assert (difference.error, difference.freedom) == (0.01, 4)  # it widens the interval, and is no more certain
    assert difference.above(-0.1) == pytest.approx(scipy.stats.t.sf(5.0, 4))
    assert math.isnan(Estimate.of({0: 0.9}, 0.02, finite=True).error)  # one model gives no spread over seeds


def five(value, spread=0.01):
    """An estimate from five seeds with the mean `value`."""
    return Estimate.of({seed: value + spread * step for seed, step in enumerate((-1.0, 1.0, 0.0, -0.5, 0.5))})


def outcome(estimate, margin=0.0, **options):
    return above("a claim", {"a part": estimate}, margin, **options).outcome


def test_fewer_than_five_seeds_are_not_a_test():
    one_seed = Estimate.of({0: 0.9})
    for other in (Estimate.of({0: 0.1}), Estimate.of(A)):
        assert outcome(one_seed - other) == UNDECIDED
    assert "±" not in str(one_seed)
    four_seeds = Estimate.of({seed: 0.9 + 0.001 * seed for seed in range(4)})
    assert outcome(four_seeds) == outcome(four_seeds - estimates.constant(0.1)) == UNDECIDED
    assert outcome(five(0.9) - four_seeds) == UNDECIDED
    assert outcome(five(0.9)) == YES
    assert outcome(estimates.constant(0.5) - estimates.constant(0.4)) == YES  # nothing was trained


@pytest.mark.parametrize(("value", "expected"), [(0.1, YES), (-0.1, NO), (0.02, UNDECIDED), (0.0, NO_DIFFERENCE)])
def test_a_difference_is_yes_no_undecided_or_none(value, expected):
    spread = 0.03 if expected == UNDECIDED else 0.01
    assert outcome(five(value, spread)) == expected
    assert outcome(five(value + 1, spread), 1.0, within=0.02) == expected


@pytest.mark.parametrize("values", [[0.1, 0.2], {1: None, 2: 0.2}, {1: "0.1"}, {}, [0.04, math.nan]])
def test_scores_without_seeds_and_p_values_without_an_order_are_one_line(values):
    call, text = (holm, "p-values must be from 0 to 1 but are") if 0.04 in values else (Estimate.of, "for each seed")
    with pytest.raises(ValueError, match=text):
        call(values)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_run_without_a_finite_score_is_named(score):
    verdict = above("a claim", {"HYLA over Softmax": Estimate.of(A | {3: score, 4: 0.7})})
    assert verdict.outcome == UNDECIDED
    assert str(verdict) == "undecided: a claim (HYLA over Softmax, a run without a finite score)"


def test_no_difference_is_the_two_one_sided_tests():
    _, high = five(0.005).interval(0.9)
    assert outcome(five(0.005), within=high + 1e-6) == NO_DIFFERENCE
    assert outcome(five(0.005), within=high - 1e-6) == outcome(five(-0.005), within=high - 1e-6) == UNDECIDED
    assert outcome(five(1.0), 1.0) == UNDECIDED  # with a margin, `within` is 0 by default


@pytest.mark.parametrize(
    ("value", "spread", "expected"),
    [
        *((0.1, 0.01, NO), (-0.1, 0.01, NO), (0.0, 0.01, YES), (0.01, 0.001, YES), (0.02, 0.03, UNDECIDED)),
        (0.024, 0.03, UNDECIDED),  # one-sided it would be NO, but either direction is one
    ],
)
def test_a_claim_of_no_difference(value, spread, expected):
    """A small difference is none, however sure; the interval is that of the test that gave the verdict."""
    verdict = no_difference("a claim", {"a part": five(value, spread)})
    assert verdict.outcome == expected
    (part,) = verdict.parts
    low, high = part.estimate.interval(part.confidence)
    assert (low > 0.0 or high < 0.0) if expected == NO else (low > -0.02 and high < 0.02) == (expected == YES)
    assert no_difference("a claim", {"a part": Estimate.of(A)}).outcome == UNDECIDED


def test_the_interval_of_an_undecided_part_holds_its_margin():
    """Of a mean below the margin, too, when other parts pass above it."""
    undecided = 0
    for value in (-0.22, -0.18, -0.14, -0.10, 0.10, 0.14, 0.18, 0.22):
        *_, part = above("a claim", {"one": five(0.5), "two": five(0.6), "part": five(value, 0.1)}).parts
        low, high = part.estimate.interval(part.confidence)
        assert (part.verdict == UNDECIDED) == (low < 0.0 < high)
        undecided += part.verdict == UNDECIDED
    assert 0 < undecided < 8


def test_a_spread_that_is_only_rounding_is_none():
    always_right = Estimate.of(dict.fromkeys(range(5), 0.1 + 0.2)) - Estimate.of(dict.fromkeys(range(5), 0.3))
    assert (always_right.error, outcome(always_right)) == (0.0, NO_DIFFERENCE)  # its mean is 5.6e-17
    assert outcome(Estimate.of(dict.fromkeys(range(5), 1.0)) - estimates.constant(1.0)) == NO_DIFFERENCE
    assert (outcome(five(0.5, 0.0), 0.4), outcome(five(0.5, 0.0), 0.6)) == (YES, NO)


def test_a_claim_in_parts_falls_with_any():
    assert all_of([YES, YES]) == YES
    assert all_of([YES, UNDECIDED]) == all_of([YES, NO_DIFFERENCE]) == all_of([]) == UNDECIDED
    assert all_of([NO_DIFFERENCE, NO_DIFFERENCE]) == NO_DIFFERENCE
    assert all_of([YES, UNDECIDED, NO, UNDECIDED]) == NO


def test_p_values_are_corrected_by_holm():
    assert holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert (holm([0.5, 0.9]), holm([])) == ([1.0, 1.0], [])


def test_a_page_is_judged_as_a_whole():
    """A part that holds alone may not hold among many.  Parts that are not a test do not count."""
    weak = five(0.024, 0.03)
    assert weak.above(0.0) == pytest.approx(0.0432, abs=1e-3)
    weak_claim = above("one", {"p": weak})
    assert weak_claim.outcome == YES
    noise = above("two", {"p": five(0.0)})
    three_seeds = above("two", {"p": Estimate.of(A)})
    for second, expected in ((noise, [UNDECIDED, NO_DIFFERENCE]), (three_seeds, [YES, UNDECIDED])):
        page = FigureOutcome(verdicts=(weak_claim, second))
        assert [verdict.outcome for verdict in page.verdicts] == expected


ALIKE = {name: five(0.9) for name in ("hyla", "softmax", "linear")}
APART = {"hyla": five(0.8), "softmax": five(0.6), "linear": five(0.5)}
BEHIND = APART | {"hyla": five(0.3)}
NOVEL = {"hyla": five(0.2), "softmax": five(-0.3)}
FAR = {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.3, 4: 0.5}
SEEDS, CHANCE = Estimate.of(FAR), Estimate.of({seed: score - 0.1 for seed, score in FAR.items()})
CODE, TEXT = "the code's definition", "the text's definition"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (lambda: fuzzy.small_gaps(ALIKE, APART), YES),
        (lambda: fuzzy.small_gaps(APART, ALIKE), NO),
        (lambda: fuzzy.small_gaps(ALIKE, BEHIND), NO),  # a gap is HYLA's lead
        (lambda: fuzzy.unknown_terms("N 16", NOVEL, five(0.7)), YES),
        (lambda: fuzzy.unknown_terms("N 16", NOVEL | {"linear": five(0.9, 0.02)}, five(0.7)), NO),
        (lambda: fuzzy.unknown_terms("N 16", NOVEL, five(0.21, 0.1)), UNDECIDED),  # the baseline has an error, too
        (lambda: probes.decodable("rule", {"HYLA": five(0.1)}, {"HYLA": five(0.1, 0.011)}), NO_DIFFERENCE),
        # scores far apart, but each is as much above the chance level of its seed
        (lambda: probes.decodable("rule", {"HYLA": SEEDS}, {"HYLA": CHANCE}), YES),
        (lambda: [counts.rarely_ambiguous(CODE, 9 / 4096, 4096)], YES),
        (lambda: [counts.rarely_ambiguous(TEXT, 0.26, 4096)], NO),
        (lambda: [counts.rarely_ambiguous(CODE, 20 / 4096, 4096)], UNDECIDED),
        (lambda: [counts.rarely_ambiguous(CODE, 0.0, 64)], UNDECIDED),  # 0 of 64 is weak evidence
    ],
)
def test_claims_that_docs_results_cannot_redraw(verdicts, expected):
    (verdict,) = verdicts()
    assert verdict.outcome == expected
    assert str(verdict).startswith(f"{expected}: {verdict.claim} (")
    assert "\n" not in str(verdict)


def test_a_claim_whose_models_were_not_run_is_left_out():
    (verdict,) = tables.ablations("fuzzy", APART)
    assert verdict.claim == "HYLA is better on unseen combinations than softmax and linear (fuzzy)"
    without_hyla = {"softmax": five(0.6), "linear": five(0.5)}
    lengths = pandas.MultiIndex.from_tuples([(16, 0.3), (16, 0.7)], names=["length", "held out"])
    assert fuzzy.suffers_less(pandas.DataFrame([without_hyla, without_hyla], index=lengths)) == []
    assert fuzzy.small_gaps(without_hyla, without_hyla) == []
    (verdict,) = scaling.solves(pandas.DataFrame([without_hyla, without_hyla]))  # without HYLA
    assert "at the largest setting" in verdict.claim
    assert scaling.single_head(pandas.DataFrame([without_hyla, without_hyla], index=[2, 8])) == []  # without one head
