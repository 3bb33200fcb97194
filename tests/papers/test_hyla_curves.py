"""Figures along an axis: their files, and verdicts on planted scores."""

from dataclasses import replace

import pytest

from polyhead.analysis import figures
from polyhead.papers import outcome
from polyhead.papers.claims import FAILS, HOLDS, OPEN
from polyhead.papers.hyla import fuzzy, scaling
from polyhead.papers.hyla.rows import row_of
from polyhead.papers.reproduce import FIGURES

pytestmark = pytest.mark.usefixtures("two_seeds_are_a_test")

BEST = {"hyla": 0.1, "softmax": 0.0, "linear": -0.05}
FLOORS = {"gaussian_process": 0.3, "ceiling": 1.0}


@pytest.fixture(autouse=True)
def quick_floors(monkeypatch):
    from polyhead.papers.estimates import constant

    found = {name: constant(value) for name, value in FLOORS.items()}
    for module in (fuzzy, scaling, outcome):
        monkeypatch.setattr(module, "floors", lambda run, split="compositional": found)


def draw(figure, study_of, tmp_path, score):
    found = FIGURES[figure].draw(study_of(figure, score), tmp_path)
    for stem, caption in found.pictures:
        assert caption
        assert (tmp_path / f"{stem}.svg").read_text().rstrip().endswith("</svg>")
    assert all(len(row) == len(found.head) for row in found.rows)
    return found


def test_2c(study_of, tmp_path):
    def score(run):
        return 0.6 + BEST[row_of(run)] - (0.1 if row_of(run) == "hyla" else 0.4) * run.task.held_out

    found = draw("fig-2c", study_of, tmp_path, score)
    assert [verdict.outcome for verdict in found.verdicts] == [HOLDS, HOLDS]
    assert len(found.rows) == 4
    assert found.numbers["N 8, held out 0.3"]["hyla"]["compositional"]["mean"] == pytest.approx(0.67)
    assert found.rows[0][0] == "N 8, 30 % held out"
    assert "0.300" in found.rows[0][-2]


def test_a3_has_all_scores(study_of, tmp_path):
    found = draw(
        "fig-a3", study_of, tmp_path, lambda run: 0.5 + BEST[row_of(run)] + 0.01 * run.seed * BEST[row_of(run)]
    )
    assert [stem for stem, _ in found.pictures] == ["fig-a3a", "fig-a3b", "fig-a3c", "fig-a3d"]
    claims = {verdict.claim.split(" ")[0]: verdict.outcome for verdict in found.verdicts}
    assert claims["no"] == HOLDS  # novel scores are planted half below: under the floor
    splits = found.numbers["N 8, held out 0.3"]["hyla"]
    assert set(splits) == {"compositional", "iid", "novel", "training loss"}


@pytest.mark.parametrize("figure", ["fig-4a", "fig-4a-heads", "fig-4b"])
def test_scaling(figure, study_of, tmp_path):
    def score(run):
        return 0.5 + BEST[row_of(run)] + 1e-3 * run.train.steps * run.model.dim * run.model.layers + 0.001 * run.seed

    found = draw(figure, study_of, tmp_path, score)
    assert [verdict.outcome for verdict in found.verdicts] == [HOLDS, FAILS, HOLDS]  # 80 % are not reached
    assert len(found.rows) == 4


def test_4_heads_grow_only_in_the_codes_reading(study_of):
    paper, code = (study_of(figure, lambda run: 0.5) for figure in ("fig-4a", "fig-4a-heads"))
    for study, heads, width in ((paper, {4}, {4, 8}), (code, {4, 8}, {4})):
        groups = [point.run.model.layer_heads(0)[0] for point in study.points]
        assert {group.heads for group in groups} == heads
        assert {group.dim for group in groups} == width


def test_a4_is_the_training_loss(study_of, tmp_path):
    found = draw("fig-a4", study_of, tmp_path, lambda run: 0.7)
    assert [stem for stem, _ in found.pictures] == ["fig-a4a", "fig-a4b"]
    losses = [v["training loss"]["mean"] for by in found.numbers.values() for v in by.values()]
    assert losses == pytest.approx([0.36] * len(losses))
    assert any(name.startswith("depth 2") for name in found.numbers)
    assert any(name.startswith("width 32") for name in found.numbers)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("fig-5c", lambda run: run.model.layer_heads(0)[0].heads),
        ("fig-5d", lambda run: -run.task.features),
        ("fig-a5", lambda run: -4 * run.task.held_out),
    ],
)
def test_over_one_axis(figure, value, study_of, tmp_path):
    up = draw(figure, study_of, tmp_path, lambda run: 0.5 + 0.1 * value(run) + 0.001 * run.seed * value(run))
    down = draw(figure, study_of, tmp_path, lambda run: 0.5 - 0.1 * value(run) + 0.001 * run.seed * value(run))
    flat = draw(figure, study_of, tmp_path, lambda run: 0.5 + 0.1 * (-1) ** (run.seed + int(value(run))))
    assert [found.verdicts[0].outcome for found in (up, down, flat)] == [HOLDS, FAILS, OPEN]


def test_heads_share_the_total_width(study_of):
    groups = [point.run.model.layer_heads(0)[0] for point in study_of("fig-5c", lambda run: 0.5).points]
    assert {group.heads * group.dim for group in groups} == {16}


def without(study, lost):
    return replace(study, points=tuple(point for point in study.points if not lost(point.run)))


@pytest.mark.parametrize("figure", ["fig-2c", "fig-a3", "fig-4a"])
def test_runs_that_failed_take_their_claims_with_them(figure, study_of, tmp_path, monkeypatch):
    """A whole model, one place of the grid, or one model there: the rest is drawn (though not written, which takes its
    time), and no verdict is of other settings than it says."""
    monkeypatch.setattr(figures, "save", lambda drawn, path: path)
    study = study_of(figure, lambda run: 0.5 + 0.01 * run.seed)
    first = place(study.points[0].run)
    for lost in (
        lambda run: row_of(run) == "hyla",
        lambda run: place(run) == first,
        lambda run: place(run) == first and row_of(run) == "hyla",
    ):
        found = FIGURES[figure].draw(without(study, lost), tmp_path)
        assert found.rows
        assert not [verdict for verdict in found.verdicts if "HYLA" in verdict.claim]


def place(run):
    return run.task.length, run.task.held_out, run.train.steps, run.model.dim
