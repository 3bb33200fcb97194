"""Baselines of a figure: means over the splits of its seeds."""

from dataclasses import replace
from unittest import mock

import pytest

from polyhead.config import Run, TransformerConfig
from polyhead.papers import outcome
from polyhead.tasks import FuzzyLogic, RelationalGames, Score


def runs_of(tasks):
    return [Run(task, TransformerConfig(*task.ends), seed=seed) for seed, task in enumerate(tasks)]


@pytest.fixture
def sequences(monkeypatch):
    monkeypatch.setattr(outcome, "BASELINE_SEQUENCES", 60)
    return 60


def test_the_baselines_of_every_seeds_own_split(sequences):
    tasks = [FuzzyLogic(length=8, held_out=0.7, split_seed=seed) for seed in range(3)]
    tables = [task.baselines("compositional", sequences=sequences, seed=seed) for seed, task in enumerate(tasks)]
    levels = outcome.baselines(runs_of(tasks) + runs_of(tasks))
    assert levels.keys() == tables[0].keys()
    for name, level in levels.items():
        pooled = Score.over([table[name] for table in tables])
        assert (level.mean, level.error, level.freedom) == (pooled.mean, pooled.standard_error, 2)
        assert level.values == {seed: table[name].mean for seed, table in enumerate(tables)}
    assert levels["mix"].mean != tables[0]["mix"].mean
    labels = ["Gaussian process", "Recall", "Mixture", "Exact ceiling"]
    assert list(outcome.baseline_means(runs_of(tasks))) == labels


def test_splits_with_the_same_functions_have_sequences_of_their_own(sequences):
    """On unknown terms all were scored on the same ones: a mean over three had a third of the variance of one."""
    tasks = [FuzzyLogic(length=8, split_seed=seed) for seed in range(3)]
    assert len(set(outcome.baselines(runs_of(tasks), "novel")["ridge"].values.values())) == 3


def test_seeds_that_share_a_split_say_nothing_of_others(sequences):
    level = outcome.baselines(runs_of([FuzzyLogic(length=8)] * 3))["ridge"]
    score = FuzzyLogic(length=8).baselines("compositional", sequences=sequences)["ridge"]
    assert (level.mean, level.error, level.freedom) == (score.mean, score.standard_error, sequences - 1)
    assert level.values == {}
    chance = outcome.baselines(runs_of([RelationalGames("same", examples=20)]), "iid")["chance"]
    assert (chance.error, chance.interval()) == (0.0, (0.5, 0.5))  # known exactly, with a single split too


def test_baselines_are_measured_once_for_all_figures(sequences):
    outcome._baseline_scores.cache_clear()
    run = runs_of([FuzzyLogic(length=8)])[0]
    with mock.patch.object(FuzzyLogic, "baselines", autospec=True, side_effect=FuzzyLogic.baselines) as measure:
        assert outcome.baselines([run]) == outcome.baselines([replace(run, name="another")])
    assert measure.call_count == 1
