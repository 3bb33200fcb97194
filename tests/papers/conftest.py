"""Finished runs without training, with planted results."""

from dataclasses import replace

import pytest
from planted import finished

import polyhead.papers.reproduce as reproduce
from polyhead import train as training
from polyhead.analysis import claims
from polyhead.config import digest
from polyhead.papers.recipes import FIGURES


def planted(run, folder, score):
    """A finished run whose compositional score is `score`, a little better in distribution."""
    metric = run.task.metric
    course = {step: {metric: score * step / run.train.steps} for step in (run.train.steps // 2, run.train.steps)}
    scores = {}
    for split in run.train.evaluate:
        value = score + {"validation": 0.05, "iid": 0.04, "novel": -0.5}.get(split, 0.0)
        other_metrics = {"element_accuracy": 0.9, "character_accuracy": 0.9, "loss": 1 - value}
        scores[split] = {**other_metrics, metric: value, f"{metric}_se": 0.01}
    losses = [1.0 - score + 0.01 * step for step in range(1, 9)]
    return finished(run, folder, scores, {"validation": course}, losses)


@pytest.fixture
def two_seeds_are_a_test(monkeypatch):
    """The smallest studies have two seeds: with it, verdicts on planted scores are tests."""
    monkeypatch.setattr(claims, "SEEDS", 2)


@pytest.fixture
def trained(monkeypatch):
    """`reproduce` trains its runs in this process."""

    def sweep(runs, folder, **_):
        placed = [replace(run, folder=str(folder / f"{run.name}-{digest(run)}")) for run in runs]
        return [training.run(run, progress=False) for run in placed]

    monkeypatch.setattr(reproduce, "sweep", sweep)


@pytest.fixture
def study_of(tmp_path):
    """The study of a figure at scale smoke, its scores planted by `score(run)`."""
    from polyhead.papers.study import Study

    def make(figure, score, scale="smoke"):
        runs = FIGURES[figure].runs(scale)
        results = [planted(run, tmp_path, score(run)) for run in runs]
        return Study.of(figure, FIGURES[figure].paper, scale, tmp_path, runs, results)

    return make
