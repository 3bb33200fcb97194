"""Estimates, tests and verdicts: against scipy, on planted numbers, and on the paper's own table."""

import math

import pytest
import scipy.stats

from polyhead.papers import estimates
from polyhead.papers.estimates import FAILS, HOLDS, OPEN, Estimate, all_of, decide
from polyhead.papers.hyla import codes, counts, fuzzy, scaling, tables
from polyhead.papers.hyla.rows import ROWS

A, B = {0: 0.61, 1: 0.74, 2: 0.66}, {0: 0.55, 1: 0.69, 2: 0.58}


def test_an_estimate_is_mean_and_standard_error():
    found = Estimate.of(A)
    assert found.mean == pytest.approx(sum(A.values()) / 3)
    assert found.error == pytest.approx(scipy.stats.sem(list(A.values())))
    assert found.freedom == 2


def test_differences_are_seed_by_seed_where_seeds_are_shared():
    found = Estimate.of(A) - Estimate.of(B)
    expected = scipy.stats.ttest_rel(list(A.values()), list(B.values()))
    assert found.mean / found.error == pytest.approx(expected.statistic)
    assert found.freedom == expected.df
    assert found.mean - found.bound() == pytest.approx(expected.confidence_interval(0.90).low)
    assert found.mean + found.bound(0.975) == pytest.approx(expected.confidence_interval(0.95).high)


def test_differences_are_welchs_where_seeds_differ():
    found = Estimate.of(A) - Estimate.of({seed + 5: value for seed, value in B.items()})
    expected = scipy.stats.ttest_ind(list(A.values()), list(B.values()), equal_var=False)
    assert found.mean / found.error == pytest.approx(expected.statistic)
    assert found.freedom == pytest.approx(expected.df)


def test_printed_numbers_are_tested_by_welch():
    a, b = Estimate.printed(0.9, 0.05), Estimate.printed(0.7, 0.02)
    assert (a - b).error == pytest.approx(math.hypot(0.05, 0.02))
    assert (a - b).freedom == pytest.approx((0.05**2 + 0.02**2) ** 2 / (0.05**4 / 2 + 0.02**4 / 2))


def test_one_seed_is_never_evidence():
    one = Estimate.of({0: 0.9})
    assert decide(one - Estimate.of({0: 0.1})) == OPEN
    assert decide(one - Estimate.of(A)) == OPEN
    assert decide(one - Estimate.printed(0.1, 0.01)) == OPEN
    assert "±" not in str(one)


@pytest.mark.parametrize(
    ("values", "outcome"), [((0.1, 0.12, 0.11), HOLDS), ((-0.1, -0.12, -0.11), FAILS), ((-0.1, 0.12, 0.01), OPEN)]
)
def test_the_three_outcomes(values, outcome):
    assert decide(Estimate.of(dict(enumerate(values)))) == outcome
    assert decide(Estimate.of({i: value + 1 for i, value in enumerate(values)}), 1.0) == outcome


def test_equal_values_leave_no_doubt():
    assert decide(Estimate.of({0: 0.5, 1: 0.5}), 0.4) == HOLDS
    assert decide(Estimate.of({0: 0.5, 1: 0.5}), 0.6) == FAILS
    assert decide(estimates.constant(0.5) - estimates.constant(0.4)) == HOLDS


def test_a_claim_in_parts_falls_with_any():
    assert all_of([HOLDS, HOLDS]) == HOLDS
    assert all_of([HOLDS, OPEN]) == OPEN
    assert all_of([HOLDS, OPEN, FAILS]) == FAILS
    assert all_of([]) == OPEN


def test_many_parts_make_a_failure_harder_not_a_success():
    down, up = Estimate.of({0: -0.1, 1: -0.16, 2: -0.2}), Estimate.of({0: 0.1, 1: 0.16, 2: 0.2})
    assert [decide(down, parts=parts) for parts in (1, 9)] == [FAILS, OPEN]
    assert [decide(up, parts=parts) for parts in (1, 9)] == [HOLDS, HOLDS]
    assert estimates.above("c", {f"p{i}": down for i in range(9)}).outcome == OPEN
    assert estimates.above("c", {"p": down}).outcome == FAILS


def test_means_and_multiples_keep_the_seeds():
    found = estimates.mean([Estimate.of(A), Estimate.of(B)])
    assert found.values == pytest.approx({seed: (A[seed] + B[seed]) / 2 for seed in A})
    assert Estimate.of(A).scaled(-2.0).error == pytest.approx(2 * Estimate.of(A).error)


def planted(best, rest=0.4, spread=0.01):
    """Scores of all models: `best` by name, `rest` otherwise, with a little spread over three seeds."""
    return {
        name: Estimate.of({seed: best.get(name, rest) + spread * (seed - 1) * (1 + i % 3) for seed in range(3)})
        for i, name in enumerate(ROWS)
    }


def test_table_a1_on_planted_scores():
    all_good = planted({"hyla": 0.9, "hyla-moe": 0.99, "softmax-moe": 0.6, "linear-moe": 0.6, "linear-rms": 0.6})
    found = {v.claim: v.outcome for v in tables.ablations("sraven", all_good | {"hyla-deep": all_good["hyla"]})}
    assert set(found.values()) == {HOLDS}
    assert len(found) == 6
    equal = {v.claim: v.outcome for v in tables.ablations("sraven", planted({"hyla-linear": 0.8}))}
    assert equal["the nonlinearity and RMSHead are both needed (sraven)"] == FAILS
    assert HOLDS not in equal.values()


def test_the_papers_own_table_does_not_separate_hylas_parts_on_fuzzy_logic():
    found = {v.claim: v.printed for v in tables.ablations("fuzzy", planted({}))}
    assert found["the nonlinearity and RMSHead are both needed (fuzzy)"] == OPEN
    on_sraven = {v.claim: v.printed for v in tables.ablations("sraven", planted({}))}
    assert on_sraven["HYLA is better on unseen combinations than softmax and linear (sraven)"] == HOLDS
    assert on_sraven["a softmax in place of RMSHead is worse (sraven)"] == HOLDS


def test_claims_whose_models_were_not_run_are_left_out():
    some = {name: score for name, score in planted({}).items() if name in ("hyla", "softmax", "linear")}
    assert [v.claim for v in tables.ablations("fuzzy", some)] == [
        "HYLA is better on unseen combinations than softmax and linear (fuzzy)"
    ]


def two(value, spread=0.01):
    return Estimate.of({0: value - spread, 1: value + spread, 2: value})


def test_hyla_suffers_less_compares_losses_not_scores():
    def cells(hyla, others):
        return {
            (16, 0.3): {"hyla": two(0.5), "softmax": two(0.9, 0.02), "linear": two(0.9)},
            (16, 0.7): {"hyla": two(hyla, 0.02), "softmax": two(others, 0.03), "linear": two(others, 0.05)},
        }

    assert fuzzy.suffers_less(cells(0.45, 0.6))[0].outcome == HOLDS
    assert fuzzy.suffers_less(cells(0.1, 0.85))[0].outcome == FAILS
    assert fuzzy.suffers_less(cells(0.45, 0.85))[0].outcome == OPEN


def test_small_gaps():
    outside = {"hyla": two(0.8), "softmax": two(0.6), "linear": two(0.5)}
    assert fuzzy.small_gaps({m: two(0.9) for m in outside}, outside)[0].outcome == HOLDS
    assert fuzzy.small_gaps(outside, {m: two(0.9) for m in outside})[0].outcome == FAILS
    behind = outside | {"hyla": two(0.3)}  # a gap has no sign
    assert fuzzy.small_gaps({m: two(0.9) for m in outside}, behind)[0].outcome == HOLDS
    assert fuzzy.small_gaps(behind, {m: two(0.9) for m in outside})[0].outcome == FAILS


def test_novel_terms_are_unsolved_below_the_floor():
    scores = {"hyla": two(0.2), "softmax": two(-0.3)}
    assert fuzzy.unknown_terms("N 16", scores, two(0.7))[0].outcome == HOLDS
    assert fuzzy.unknown_terms("N 16", scores | {"linear": two(0.9, 0.02)}, two(0.7))[0].outcome == FAILS
    assert fuzzy.unknown_terms("N 16", scores, two(0.21, 0.1))[0].outcome == OPEN  # the floor has an error, too


def test_scaling_and_heads():
    small = {"hyla": two(0.3), "softmax": two(0.2), "linear": two(0.1)}
    large = {"hyla": two(0.9), "softmax": two(0.85), "linear": two(0.82)}
    assert [v.outcome for v in scaling.solves({1: small, 2: large})] == [HOLDS, HOLDS]
    assert [v.outcome for v in scaling.solves({1: large, 2: small})] == [FAILS, HOLDS]
    assert scaling.single_head({1: small, 8: large})[0].outcome == HOLDS
    assert scaling.single_head({8: large, 1: large, 2: small})[0].outcome == FAILS  # 2 heads against 1, not against 8
    assert scaling.harder({2: large, 4: small}, "features")[0].outcome == HOLDS


def test_a_claim_about_what_is_missing_is_left_out():
    others = {"softmax": two(0.6), "linear": two(0.5)}
    assert fuzzy.suffers_less({(16, 0.3): others, (16, 0.7): others}) == []
    assert fuzzy.small_gaps(others, others) == []
    assert [v.claim.split()[2] for v in scaling.solves({1: others, 2: others})] == ["largest"]  # HYLA was not run
    assert scaling.single_head({2: others, 8: others}) == []  # a single head was not measured


def test_codes():
    assert codes.decodable("rule", {"HYLA": two(0.5)}, {"HYLA": two(0.1)})[0].outcome == HOLDS
    assert codes.decodable("rule", {"HYLA": two(0.1)}, {"HYLA": two(0.3)})[0].outcome == FAILS
    apart = {0: 0.2, 1: 0.4, 2: 0.6}  # far apart, but every seed is as much above its own chance level
    scores, chance = Estimate.of(apart), Estimate.of({seed: value - 0.1 for seed, value in apart.items()})
    assert codes.decodable("rule", {"HYLA": scores}, {"HYLA": chance})[0].outcome == HOLDS
    assert codes.order_of_layers({"HYLA": two(0.2)}, {"HYLA": two(-0.2)})[0].outcome == FAILS
    assert codes.shared_code(two(0.4))[0].outcome == HOLDS


def test_ambiguity_by_both_definitions():
    assert counts.rarely_ambiguous("the code's definition", 9 / 4096, 4096).outcome == HOLDS
    assert counts.rarely_ambiguous("the text's definition", 0.26, 4096).outcome == FAILS
    assert counts.rarely_ambiguous("the code's definition", 20 / 4096, 4096).outcome == OPEN
    assert counts.rarely_ambiguous("the code's definition", 0.0, 64).outcome == OPEN  # none seen in 64 says little


def test_a_verdict_is_one_line():
    assert str(codes.shared_code(two(0.4))[0]).startswith("holds: sum and difference share a code (")
    assert "\n" not in str(codes.shared_code(two(0.4))[0])
