"""Baselines and ceiling: against scikit-learn, plain loops, brute force, and known values."""

import itertools

import numpy as np
import pytest
import torch
from refusals import refusing
from sklearn.dummy import DummyRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsRegressor

from polyhead.tasks import FuzzyLogic, Score
from polyhead.tasks.base import Batch
from polyhead.tasks.fuzzy_logic import baselines as fuzzy_baselines
from polyhead.tasks.fuzzy_logic.baselines import (
    PENALTIES,
    WIDTHS,
    baselines,
    ceiling,
    from_context,
    from_functions,
    mix,
    recall,
    settings,
    values,
)
from polyhead.tasks.fuzzy_logic.task import zadeh

ESTIMATORS = {
    "context_mean": DummyRegressor(),
    "nearest_neighbour": KNeighborsRegressor(n_neighbors=1),
    "ridge": Ridge(alpha=1.0),
    "gaussian_process": GaussianProcessRegressor(RBF(0.5), alpha=0.01, optimizer=None),
}


@pytest.mark.parametrize("length", [3, 32])
def test_every_baseline_is_scikit_learns(length):
    task = FuzzyLogic(length=length)
    batch = task.batch("novel", 20, seed=0, step=0)
    inputs = batch.inputs.clone()
    inputs[:, -1, -1] = 0.7  # in the place of the hidden target, which no baseline sees
    unseen = Batch(inputs, torch.full_like(batch.targets, float("nan")), None, batch.scored, {})
    predictions = from_context(unseen)
    assert list(predictions) == list(ESTIMATORS)
    for name, estimator in ESTIMATORS.items():
        for tokens, prediction in zip(batch.inputs.double().numpy(), predictions[name], strict=True):
            x, y = tokens[:-1, :-1], tokens[:-1, -1]  # the process has prior mean 0, ours that of the context
            fitted = estimator.fit(x, y - y.mean()).predict(tokens[-1:, :-1])[0] + y.mean()
            assert prediction.item() == pytest.approx(fitted, abs=1e-9)
    assert list(baselines(task, "novel", sequences=20)) == [*ESTIMATORS, "recall", "mix", "ceiling"]


SMALL = FuzzyLogic(variables=3, terms=3, unknown=0.4, length=12, held_out=0.3)


@pytest.mark.parametrize("task", [FuzzyLogic(length=6), SMALL])
def test_recall_and_mix_are_what_loops_and_scikit_learn_give(task, monkeypatch):
    width, penalty = settings(task)
    monkeypatch.setattr(fuzzy_baselines, "LARGEST", 4 * task.length * len(task.functions("train")))  # four at once
    batch = task.batch("compositional", 6, seed=0, step=0)
    predictions = from_functions(task, batch)
    for b, tokens in enumerate(batch.inputs.double().tolist()):
        columns = []
        for terms in task.functions("train").tolist():
            columns.append([max(term(t, tokens[i][:-1]) for t in terms) for i in range(task.length)])
        table, y = np.array(columns).T, np.array([token[-1] for token in tokens[:-1]])
        weights = np.exp(-((table[:-1] - y[:, None]) ** 2).sum(axis=0) / (2 * width**2))
        assert predictions["recall"][b] == pytest.approx((weights * table[-1]).sum() / weights.sum(), abs=1e-6)
        fitted = Ridge(alpha=penalty, fit_intercept=False).fit(table[:-1], y)
        assert predictions["mix"][b] == pytest.approx(fitted.predict(table[-1:])[0], abs=1e-5)


def term(number, x):
    return min(v if number >> (len(x) - 1 - i) & 1 else 1 - v for i, v in enumerate(x))


def test_settings_are_chosen_where_a_function_misses_itself():
    """With the function itself among them, the narrowest and the least penalty would be best."""
    task = FuzzyLogic(held_out=0.7)
    batch, rows = task.batch("validation", fuzzy_baselines.CHOSEN_ON, seed=0, step=0), task.functions("train")
    known, y, target = values(batch.inputs[..., :-1], rows), batch.inputs[:, :-1, -1].double(), batch.targets[:, -1, 0]
    is_itself = (batch.latents["terms"][:, None] == rows).all(dim=-1)
    for baseline, grid, chosen in zip((recall, mix), (WIDTHS, PENALTIES), settings(task), strict=True):
        for left_out, best in ((is_itself, chosen), (None, grid[0])):
            errors = [(baseline(known, y, value, left_out) - target).square().mean() for value in grid]
            assert grid[int(torch.stack(errors).argmin())] == best
        assert grid[0] < chosen < grid[-1]  # the grid holds it


@pytest.mark.parametrize(("variables", "terms", "length"), [(4, 2, 3), (4, 2, 6), (4, 2, 16), (3, 2, 4), (4, 3, 7)])
def test_the_ceiling_is_the_mean_over_all_functions_that_agree(variables, terms, length):
    task = FuzzyLogic(variables=variables, terms=terms, length=length)
    batch = task.batch("compositional", 40, seed=0, step=0)
    all_functions = torch.tensor(list(itertools.combinations(range(2**variables), terms)))
    predictions = ceiling(task, batch)
    for b in range(40):
        x = batch.inputs[b, :, :-1].expand(len(all_functions), -1, -1)
        values = zadeh(x, all_functions)
        agreeing = (values[:, :-1] == batch.targets[b, :-1, 0]).all(dim=1)
        torch.testing.assert_close(predictions[b], values[agreeing, -1].double().mean())


def test_a_score_over_splits_is_uncertain_by_splits_and_by_sequences():
    pooled = Score.over([Score(0.6, 0.3, 10), Score(1.0, 0.1, 20)])  # s² = 0.08, mean(e²) = 0.05
    assert (pooled.mean, pooled.standard_error, pooled.count) == pytest.approx((0.8, 0.2, 30))
    assert Score.over([Score(0.5, 0.3, 9)] * 4) == Score(0.5, 0.15, 36)  # equal by chance, not sure
    assert Score.over([Score(0.5, 0.3, 9)]) == Score(0.5, 0.3, 9)


def test_mistakes_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(fuzzy_baselines, "LISTED_CANDIDATES", 20)
    with refusing("functions of 2 terms possible, but the ceiling can enumerate at most 20; use a longer context"):
        baselines(FuzzyLogic(variables=4, terms=2, length=2), "iid", sequences=50)
