"""The dual-attention study: the files of its figures, and verdicts on planted scores."""

from dataclasses import replace

import pytest
from drawn import draw, outcomes, quick, scores  # noqa: F401 (a fixture)

from polyhead.papers.claims import FAILS, HOLDS, OPEN
from polyhead.papers.dual import games, shared
from polyhead.papers.dual.models import row_of
from polyhead.tasks import ObjectSorting, PairwiseOrder, RelationalGames, SetCards

pytestmark = pytest.mark.usefixtures("two_seeds_are_a_test")

AHEAD = {"dual": 0.2, "relational": 0.15, "corelnet": 0.3, "dual-package": 0.1, "disentangled": 0.05}
score = scores(AHEAD)


def test_the_pictures_of_games(study_of, tmp_path):
    found = draw(
        without(study_of("games", score), lambda run: run.task.game in ("same", "xoccurs", "between")), tmp_path
    )
    assert [stem for stem, _ in found.pictures] == ["games", "games-hexominoes", "games-stripes"]


def test_games(study_of, tmp_path):
    found = draw(study_of("games", score), tmp_path)
    said = outcomes(found)
    assert len(said) == 5 * 2 + 7
    for claim, came in said.items():
        better = "PrediNet" not in claim and "Abstractor," not in claim
        assert came == (HOLDS if better else FAILS), claim
    assert outcomes(draw(study_of("games", lambda run: score(run, -1.0)), tmp_path)) == {
        claim: FAILS if came == HOLDS else HOLDS for claim, came in said.items()
    }


def test_games_without_evidence(study_of, tmp_path):
    found = draw(study_of("games", lambda run: 0.5 + 0.1 * (-1) ** run.seed * AHEAD.get(row_of(run), 0.0)), tmp_path)
    assert set(outcomes(found).values()) == {OPEN}


def test_a_claim_about_curves_is_about_all_sizes(study_of, tmp_path):
    """A lead at the least images is lost by a greater one at the most; unseen shapes are those at the most, and so are
    the images that a model made for relations alone is judged by."""
    learns = "dual attention learns {} from fewer examples than softmax heads"
    unseen = "on unseen shapes, too, dual attention is better than softmax heads"
    alone = "CoRelNet, a model made for relations alone, is better than dual attention"

    def said(ahead_at_most, ahead_before):
        signs = {True: ahead_at_most, False: ahead_before}
        found = draw(study_of("games", lambda run: score(run, signs[run.task.examples == 32])), tmp_path)
        return {claim: outcomes(found)[claim] for claim in (learns.format("same"), unseen, alone)}

    assert said(-1.0, 2.0) == {learns.format("same"): HOLDS, unseen: FAILS, alone: FAILS}
    assert said(1.0, -2.0) == {learns.format("same"): FAILS, unseen: HOLDS, alone: HOLDS}


def test_the_table_of_games(study_of, tmp_path):
    found = draw(study_of("games", score), tmp_path)
    assert len(found.rows) == 5 * 2 * (11 + 1)
    row = next(row for row in found.rows if row[:3] == ("occurs", "32", "Dual attention"))
    assert row[3:6] == ("0.741 ± 0.001", "0.701 ± 0.001", "0.701 ± 0.001")
    assert row[6].startswith("0.619 (250), 0.775 (500)")
    assert row[7:] == ("10", "4")
    cell = found.numbers["occurs, 32"]["dual"]["stripes"]
    assert cell["mean"] == pytest.approx(0.701)
    assert any("package" in note for note in found.notes)


def drawn(study, tmp_path, monkeypatch):
    """The levels of the panels of every picture, by its name and the panel's."""
    seen = {}

    def lines(panels, path, **_):
        seen.update({(path.stem, title): levels for title, _, levels in panels})
        path.write_text("</svg>")

    monkeypatch.setattr(shared.figures, "lines", lines)
    return draw(study, tmp_path), seen


def test_what_needs_no_relation_stands_beside_games(study_of, tmp_path, monkeypatch):
    """In pictures by the number of images, in the table below the models: over every seed's own images."""
    found, seen = drawn(study_of("games", score), tmp_path, monkeypatch)
    for stem, split in (("games", "iid"), ("games-stripes", "novel_stripes")):
        each = {
            n: [RelationalGames("between", n, split_seed=seed).floors(split, sequences=60) for seed in (0, 1)]
            for n in (16, 32)
        }
        assert len({one["known_pairs"].mean for one in each[32]}) == (2 if split == "iid" else 1)
        wanted = {n: sum(one["known_pairs"].mean for one in both_) / 2 for n, both_ in each.items()}
        assert seen[stem, "between"] == {"chance": 0.5, "Known pairs": pytest.approx(wanted)}
    at = [i for i, row in enumerate(found.rows) if row[:3] == ("between", "32", "Known pairs")]
    assert len(at) == 1
    assert found.rows[at[0] - 1][:2] == ("between", "32")
    assert found.rows[at[0]][4:6] == ("0.500 ± 0.000",) * 2
    assert found.rows[at[0]][6:] == ("–", "–", "–")
    assert found.numbers["between, 32"]["Known pairs"]["stripes"]["mean"] == 0.5


@pytest.mark.parametrize(
    ("figure", "task", "split", "name"),
    [
        ("sorting", ObjectSorting, "iid", "known_objects"),
        ("order", PairwiseOrder, "validation", "known_objects"),
        ("set", SetCards, "validation", "known_pairs"),
    ],
)
def test_what_needs_no_relation_stands_beside_objects(figure, task, split, name, study_of, tmp_path, monkeypatch):
    study = study_of(figure, score)
    found, seen = drawn(study, tmp_path, monkeypatch)
    tasks = dict.fromkeys(point.run.task for point in study.points)
    most = max(one.examples or 0 for one in tasks)
    means = [one.floors(split, sequences=60)[name].mean for one in tasks if most in (0, one.examples)]
    ((_, levels),) = seen.items()
    level = levels[tasks_floor(study, name)]
    if figure == "sorting":
        level = level[most]
    assert level == pytest.approx(sum(means) / len(means))
    rows = [row for row in found.rows if tasks_floor(study, name) in row]
    assert rows
    assert f"{level:.3f}" in "".join(rows[-1])


def tasks_floor(study, name):
    return study.points[0].run.task.words.floors[name].label


def test_the_papers_numbers():
    for game, by_model in games.PRINTED.items():
        sizes = set(by_model["dual"])
        assert sizes == set(by_model["relational"]) == set(by_model["softmax"])
        assert (max(sizes) == 25_000) == (game == "match_pattern")
    assert games.PRINTED["occurs"]["softmax"][500] == 0.525
    assert games.PRINTED["xoccurs"]["relational"][2500] == 0.886


def without(study, lost):
    return replace(study, points=tuple(point for point in study.points if not lost(point.run)))


def test_runs_that_failed_take_their_claims_with_them(study_of, tmp_path):
    study = study_of("games", score)
    found = draw(without(study, lambda run: run.task.game == "same" and row_of(run) == "dual"), tmp_path)
    assert not [claim for claim in outcomes(found) if " same " in claim]
    assert len(found.verdicts) == 4 * 2 + 7
    *of_dual, of_disentangled = found.verdicts  # the last claim compares models that all finished
    assert not [verdict for verdict in of_dual if "same" in verdict.evidence]
    assert "same" in of_disentangled.evidence
    assert not [
        c for c in outcomes(draw(without(study, lambda run: row_of(run) == "corelnet"), tmp_path)) if "CoRelNet" in c
    ]
    rest = draw(without(study, lambda run: row_of(run) in ("dual", "disentangled")), tmp_path)
    assert rest.verdicts == ()
