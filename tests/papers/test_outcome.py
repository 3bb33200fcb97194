"""Baselines of a figure: means over the splits of its seeds."""

from dataclasses import replace

import pytest

from polyhead.config import Run, TransformerConfig
from polyhead.papers import outcome
from polyhead.tasks import FuzzyLogic, RelationalGames, Score


def runs_of(tasks):
    return [Run(task, TransformerConfig(*task.ends), seed=seed) for seed, task in enumerate(tasks)]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(outcome, "BASELINE_SEQUENCES", 60)
    return 60


def test_the_baselines_of_every_seeds_own_split(few):
    tasks = [FuzzyLogic(length=8, held_out=0.7, split_seed=seed) for seed in range(3)]
    each = [task.baselines("compositional", sequences=few, seed=seed) for seed, task in enumerate(tasks)]
    found = outcome.baselines(runs_of(tasks) + runs_of(tasks))
    for name, level in found.items():
        over = Score.over([table[name] for table in each])
        assert (level.mean, level.error, level.freedom) == (over.mean, over.standard_error, 2)
        assert level.values == {seed: table[name].mean for seed, table in enumerate(each)}
    assert found["mix"].mean != each[0]["mix"].mean
    drawn = ["Gaussian process", "Recall", "Mixture", "Exact ceiling"]
    assert list(outcome.baseline_means(runs_of(tasks))) == drawn


def test_splits_with_the_same_functions_have_sequences_of_their_own(few):
    """On unknown terms all were scored on the same ones: a mean over three had a third of the variance of one."""
    tasks = [FuzzyLogic(length=8, split_seed=seed) for seed in range(3)]
    assert len(set(outcome.baselines(runs_of(tasks), "novel")["ridge"].values.values())) == 3


def test_seeds_that_share_a_split_say_nothing_of_others(few):
    level = outcome.baselines(runs_of([FuzzyLogic(length=8)] * 3))["ridge"]
    alone = FuzzyLogic(length=8).baselines("compositional", sequences=few)["ridge"]
    assert (level.mean, level.error, level.freedom, level.values) == (alone.mean, alone.standard_error, few - 1, {})
    chance = outcome.baselines(runs_of([RelationalGames("same", examples=20)]), "iid")["chance"]
    assert (chance.error, chance.interval()) == (0.0, (0.5, 0.5))  # known exactly, with a single split too


def test_baselines_are_measured_once_for_all_figures(few, monkeypatch):
    outcome._baseline_scores.cache_clear()
    calls = []
    measure = FuzzyLogic.baselines
    monkeypatch.setattr(FuzzyLogic, "baselines", lambda task, *a, **k: calls.append(task) or measure(task, *a, **k))
    run = runs_of([FuzzyLogic(length=8)])[0]
    assert outcome.baselines([run]) == outcome.baselines([replace(run, name="another")])
    assert len(calls) == 1
