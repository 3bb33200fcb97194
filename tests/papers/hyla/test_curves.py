"""Figures along an axis that docs/results cannot redraw, baselines, and claims whose runs failed."""

import pytest
from drawn import draw, without

from polyhead.analysis import figures
from polyhead.analysis.claims import constant
from polyhead.papers import outcome
from polyhead.papers.hyla import fuzzy
from polyhead.papers.hyla.rows import HYLA
from polyhead.papers.reproduce import FIGURES

pytestmark = pytest.mark.usefixtures("two_seeds_are_a_test")

BASELINES = {"gaussian_process": 0.3, "ceiling": 1.0}


@pytest.fixture(autouse=True)
def quick_baselines(monkeypatch):
    estimates = {name: constant(value) for name, value in BASELINES.items()}
    monkeypatch.setattr(outcome, "baselines", lambda run, split="compositional": estimates)


def test_a3_leaves_out_baselines_that_would_flatten_its_curves(study_of, monkeypatch):
    drawn_panels = []
    levels = {"Mixture": {8: -6.8, 16: -2.0}, "Recall": {8: -0.4, 16: 0.1}}
    monkeypatch.setattr(outcome, "baseline_curves", lambda cells, split: levels)
    monkeypatch.setattr(figures, "lines", lambda panels, **_: drawn_panels.extend(panels))
    fuzzy.draw_a3(study_of("fig-a3", lambda run: 0.5 + 0.01 * run.seed))
    assert set().union(*(baselines for _, _, baselines in drawn_panels)) == {"Recall"}


def test_2c_has_its_baselines_in_the_last_columns(study_of):
    drawn = draw(study_of("fig-2c", lambda run: 0.5))
    assert (drawn.rows[0][0], *drawn.rows[0][-2:]) == ("N 8, 30 % held out", "0.300 ± 0.000", "1.000 ± 0.000")
    assert drawn.head[-2:] == ("Gaussian process", "Exact ceiling")


def test_a4_is_the_training_loss_in_two_pictures(study_of):
    drawn = draw(study_of("fig-a4", lambda run: 0.7))
    assert [picture.stem for picture in drawn.pictures] == ["fig-a4a", "fig-a4b"]
    losses = [scores["training loss"]["mean"] for models in drawn.numbers.values() for scores in models.values()]
    assert losses == pytest.approx([0.36] * len(losses))
    assert any(name.startswith("depth 2") for name in drawn.numbers)
    assert any(name.startswith("width 32") for name in drawn.numbers)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("figure", ["fig-2c", "fig-a3", "fig-4a"])
def test_runs_that_failed_take_their_claims_with_them(figure, study_of):
    """A whole model, one place of the grid, or one model there: the rest is drawn, and every verdict is about the
    settings that it names."""
    study = study_of(figure, lambda run: 0.5 + 0.01 * run.seed)
    first = setting_of(study.points[0].run)
    assert any("HYLA" in verdict.claim for verdict in FIGURES[figure].draw(study).verdicts)
    for failed in (
        lambda run: HYLA.row_of(run) == "hyla",
        lambda run: setting_of(run) == first,
        lambda run: setting_of(run) == first and HYLA.row_of(run) == "hyla",
    ):
        drawn = FIGURES[figure].draw(without(study, failed))
        assert drawn.rows
        assert not [verdict for verdict in drawn.verdicts if "HYLA" in verdict.claim]
        if figure == "fig-4a":
            assert "gaussian process: 0.300 ± 0.000" in drawn.notes
    drawn = FIGURES[figure].draw(without(study, lambda run: HYLA.row_of(run) == "linear"))
    assert any("gaps between the models" in verdict.claim for verdict in drawn.verdicts) == (figure == "fig-a3")


def setting_of(run):
    return run.task.length, run.task.held_out, run.train.steps, run.model.dim
