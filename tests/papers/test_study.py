"""Cells of a study, and the selection of settings on validation."""

import math
from dataclasses import replace

import pytest
from some import some

from polyhead.papers.study import Study
from polyhead.scale.sweep import Failure
from polyhead.tasks import FuzzyLogic
from polyhead.train.stop import DIVERGED


def by_rate(high, low):
    """Scores by learning rate; smoke has 1e-3 and 3e-3."""
    return lambda run: (high if run.train.lr > 2e-3 else low) + 0.01 * run.seed


def test_the_reported_splits_are_not_looked_at_for_the_selection(study_of):
    study = study_of("table-a1", by_rate(0.2, 0.6))
    points = []
    for point in study.points:  # the better a setting is on validation, the worse elsewhere
        scores = {}
        for split, values in point.result.scores.items():
            sign = 1 if split == "validation" else -1
            scores[split] = {name: sign * value for name, value in values.items()}
        points.append(replace(point, result=replace(point.result, scores=scores)))
    for cell in some(list(replace(study, points=tuple(points)).cells("model", task="sraven"))):
        assert cell.setting.lr == 1e-3
        assert cell.score("compositional").mean < -0.5


def test_a_setting_with_fewer_finished_seeds_is_not_selected(study_of):
    study = study_of("table-a1", by_rate(0.6, 0.2))
    finished = [p for p in study.points if p.run.seed == 0 or p.run.train.lr < 2e-3]
    cells = replace(study, points=tuple(finished)).cells("model", task="fuzzy")
    assert {cell.setting.lr for cell in cells} == {1e-3}
    assert {len(cell.points) for cell in cells} == {2}
    kept = [p for p in study.points if p.run.train.lr < 2e-3]
    lost = [p.run for p in study.points if p.run.train.lr > 2e-3]  # of a rate at which every seed diverged
    cells = replace(study, points=tuple(kept), diverged=tuple(lost)).cells("model", task="fuzzy")
    assert {cell.tried for cell in cells} == {2}


def test_a_diverged_seed_leaves_its_cell_without_a_score(study_of):
    """Six seeds of which one diverged are no test of the other five; a worker that was killed may still finish."""
    study = study_of("fig-2c", by_rate(0.6, 0.2))
    runs = [point.run for point in study.points]
    for code in (2, -9):
        failure = Failure("one", study.folder, code, f"the loss is nan; {DIVERGED}" if code == 2 else "killed")
        outcomes = [failure if point.run.seed == 1 else point.result for point in study.points]
        again = Study.of(study.figure, study.paper, study.scale, study.folder, runs, outcomes)
        cells = again.cells("model", "held out")
        assert {math.isnan(cell.score("iid").mean) for cell in cells} == {code == 2}


@pytest.mark.parametrize(("better", "low", "chosen"), [("lower", 0.2, 1e-3), ("higher", float("nan"), 3e-3)])
def test_the_better_score_is_selected_and_never_one_that_is_no_number(better, low, chosen, study_of, monkeypatch):
    """The first of the settings is the one with the low score, or with none."""
    monkeypatch.setattr(FuzzyLogic, "better", better)
    cells = study_of("table-a1", by_rate(0.6, low)).cells("model", task="fuzzy")
    assert {cell.setting.lr for cell in cells} == {chosen}


def test_a_result_that_lacks_a_score_is_an_error_of_one_line(study_of):
    point = study_of("table-a1", by_rate(0.6, 0.2)).points[0]
    bare = replace(point, result=replace(point.result, scores={"validation": {}}))
    for split in ("validation", "iid"):
        with pytest.raises(ValueError, match=rf"result\.json: no r2 on {split}, so it is not of this version"):
            bare.score(split)
    (point.result.folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no training loss during training is kept; train this run again"):
        point.course("training loss")
