"""The dual-attention study: verdicts on planted scores for both outcomes, tables, and failed runs."""

from dataclasses import replace

import pytest
from drawn import draw, outcomes, quick, scores  # noqa: F401 (a fixture)

from polyhead.papers.claims import FAILS, HOLDS, OPEN
from polyhead.papers.dual import questions, shared
from polyhead.papers.dual.models import relational_of, row_of, split_of
from polyhead.papers.estimates import Estimate

pytestmark = pytest.mark.usefixtures("two_seeds_are_a_test")

AHEAD = {"dual": 0.2, "abstractor": 0.1, "corelnet": 0.3, "disentangled": 0.05}
score = scores(AHEAD)


COUNTS = {"sorting": 5, "order": 5, "set": 5, "maths": 9, "images": 5}


@pytest.mark.parametrize("figure", COUNTS)
def test_verdicts_follow_the_scores(figure, study_of, tmp_path):
    said = outcomes(draw(study_of(figure, score), tmp_path))
    assert len(said) == COUNTS[figure]
    ahead = {claim: FAILS if "Abstractor is better than Softmax and Dual" in claim else HOLDS for claim in said}
    assert said == ahead
    behind = outcomes(draw(study_of(figure, lambda run: score(run, -1.0)), tmp_path))
    assert all(behind[claim] == FAILS for claim in said)
    noisy = draw(study_of(figure, lambda run: 0.5 + (-1) ** run.seed * AHEAD.get(row_of(run), 0.0)), tmp_path)
    assert set(outcomes(noisy).values()) == {OPEN}


@pytest.mark.parametrize(
    "figure",
    [pytest.param("images", marks=pytest.mark.campaign), "symbols", pytest.param("split", marks=pytest.mark.campaign)],
)
def test_their_pictures(figure, study_of, tmp_path):
    assert [stem for stem, _ in draw(study_of(figure, score), tmp_path).pictures] == [figure]


def test_the_table_of_maths_has_the_papers_characters(study_of, tmp_path):
    found = draw(study_of("maths", score), tmp_path)
    row = next(row for row in found.rows if row[:2] == ("polynomials: expand", "Dual attention"))
    assert row[2:] == ("0.741 ± 0.001", "0.701 ± 0.001", "0.201 ± 0.001", "0.900 ± 0.000", "0.779 ± 0.001", "10", "4")
    assert [r[6] for r in found.rows if r[1] == "Softmax + RoPE"] == ["–"] * 5


@pytest.mark.parametrize("figure", COUNTS)
def test_runs_that_failed_take_their_claims_with_them(figure, study_of, tmp_path):
    study = study_of(figure, score)
    for lost in ("dual", "softmax"):
        rest = replace(study, points=tuple(point for point in study.points if row_of(point.run) != lost))
        word = {"dual": "Dual attention", "softmax": "Softmax "}[lost]
        found = draw(rest, tmp_path)
        assert found.rows
        assert not [
            v for v in found.verdicts if f"{word} is" in v.claim or f"over {word}".rstrip() in v.evidence.split("; ")
        ]
    if figure in ("maths", "sorting"):
        here = place(study.points[0].run)
        rest = replace(study, points=tuple(point for point in study.points if place(point.run) != here))
        assert draw(rest, tmp_path).verdicts == ()


def place(run):
    return row_of(run), getattr(run.task, "module", None), getattr(run.task, "examples", None)


def choice(run):
    group = relational_of(run)
    return type(group.symbols).__name__, group.symmetric, group.relations or 1


def test_symbols(study_of, tmp_path):
    def by_choice(run, sign):
        kind, symmetric, count = choice(run)
        value = 0.1 * symmetric + 0.02 * count + 0.05 * (kind == "PositionSymbols")
        return 0.5 + sign * value * (1 + 0.01 * run.seed)

    found = draw(study_of("symbols", lambda run: by_choice(run, 1.0)), tmp_path)
    assert [verdict.outcome for verdict in found.verdicts] == [HOLDS] * 3
    assert found.rows[0][:4] == ("by place", "learned", "yes", "4")
    assert found.notes[0] == "The best on validation data: symbols by place, learned positions, symmetric, 4 relations."
    assert len(found.rows) == 4 * 2 * 2 + 4
    found = draw(study_of("symbols", lambda run: by_choice(run, -1.0)), tmp_path)
    assert [verdict.outcome for verdict in found.verdicts] == [FAILS] * 3
    assert found.rows[-1][:4] == ("by place", "learned", "yes", "4")


def test_split(study_of, tmp_path):
    def by_heads(run, sign):
        softmax, relational = split_of(run)
        return 0.5 + sign * (0.01 * softmax + 0.1 * relational) * (1 + 0.01 * run.seed)

    found = draw(study_of("split", lambda run: by_heads(run, 1.0)), tmp_path)
    assert [verdict.outcome for verdict in found.verdicts] == [HOLDS] * 3
    assert [row[:2] for row in found.rows] == [
        *(("2", "0"), ("1", "1"), ("4", "0"), ("3", "1"), ("2", "2"), ("1", "3"), ("0", "4"))
    ]
    assert outcomes(draw(study_of("split", lambda run: by_heads(run, -1.0)), tmp_path)) == dict.fromkeys(
        outcomes(found), FAILS
    )


def test_claims_need_what_they_compare():
    one = Estimate.of({0: 0.5, 1: 0.6})
    assert questions.splits({(2, 0): one}) == []
    assert questions.choices({("by place", "learned", True, 1): one}) == []
    assert questions.choices({("by place", "rotary", True, 1): one, ("by place", "learned", False, 1): one}) == []
    assert shared.better("x", "dual", ("softmax",), {"a": {"dual": one}}) == []
