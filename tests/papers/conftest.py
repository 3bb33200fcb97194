"""Finished runs without training, with planted results."""

import json
from dataclasses import replace

import pytest

import polyhead.papers.reproduce as reproduce
from polyhead import train as training
from polyhead.analysis import claims
from polyhead.config import digest
from polyhead.papers.recipes import FIGURES
from polyhead.train.store.folder import METRICS, Result


def planted(run, folder, score):
    """A finished run of `folder` whose compositional score is `score`, a little better in distribution."""
    place = folder / f"{run.name}-{digest(run)}"
    place.mkdir(parents=True, exist_ok=True)
    rows = [{"kind": "train", "step": i, "loss": 1.0 - score + 0.01 * i} for i in range(1, 9)]
    metric = run.task.metric
    at = (run.train.steps // 2, run.train.steps)
    rows += [{"kind": "eval", "step": i, "split": "validation", metric: score * i / run.train.steps} for i in at]
    (place / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"validation": 0.05, "iid": 0.04, "novel": -0.5}
    values = {split: score + more.get(split, 0.0) for split in run.train.evaluate}
    more_metrics = dict.fromkeys(("element_accuracy", "character_accuracy"), 0.9)
    scores = {
        s: {**more_metrics, metric: value, f"{metric}_se": 0.01, "loss": 1 - value} for s, value in values.items()
    }
    about = {"seconds": 2.0, "parameters": 10, "command": "", "environment": {"device": "cpu"}}
    return Result(name=run.name, digest=digest(run), steps=run.train.steps, scores=scores, folder=place, **about)


@pytest.fixture
def two_seeds_are_a_test(monkeypatch):
    """The smallest studies have two seeds: with it, verdicts on planted scores are tests."""
    monkeypatch.setattr(claims, "SEEDS", 2)


@pytest.fixture
def trained(monkeypatch):
    """`reproduce` trains its runs in this process."""

    def sweep(runs, folder, **_):
        there = [replace(run, folder=str(folder / f"{run.name}-{digest(run)}")) for run in runs]
        return [training.run(run, progress=False) for run in there]

    monkeypatch.setattr(reproduce, "sweep", sweep)


@pytest.fixture
def study_of(tmp_path):
    """The study of a figure at scale smoke, its scores planted by `score(run)`."""
    from polyhead.papers.study import Study

    def make(figure, score, scale="smoke"):
        known = FIGURES[figure]
        runs = known.runs(scale)
        return Study.of(
            figure, known.paper, scale, tmp_path, runs, [planted(run, tmp_path, score(run)) for run in runs]
        )

    return make
