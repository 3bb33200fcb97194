"""Baselines made from training functions: by hand, against plain loops and scikit-learn, and at known values."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from polyhead.tasks import FuzzyLogic
from polyhead.tasks.fuzzy_logic import function_baselines
from polyhead.tasks.fuzzy_logic.function_baselines import PENALTIES, WIDTHS, mix, predictions, recall, settings, values

SMALL = FuzzyLogic(variables=3, terms=3, unknown=0.4, length=12, held_out=0.3)


@pytest.mark.parametrize("task", [FuzzyLogic(length=6), SMALL])
def test_both_are_what_loops_and_scikit_learn_say(task, monkeypatch):
    width, penalty = settings(task)
    monkeypatch.setattr(function_baselines, "LARGEST", 4 * task.length * len(task.functions("train")))  # four at once
    batch = task.batch("compositional", 6, seed=0, step=0)
    found = predictions(task, batch)
    for b, tokens in enumerate(batch.inputs.double().tolist()):
        columns = []
        for terms in task.functions("train").tolist():
            columns.append([max(term(t, tokens[i][:-1]) for t in terms) for i in range(task.length)])
        table, y = np.array(columns).T, np.array([token[-1] for token in tokens[:-1]])
        weights = np.exp(-((table[:-1] - y[:, None]) ** 2).sum(axis=0) / (2 * width**2))
        assert found["recall"][b] == pytest.approx((weights * table[-1]).sum() / weights.sum(), abs=1e-6)
        fitted = Ridge(alpha=penalty, fit_intercept=False).fit(table[:-1], y)
        assert found["mix"][b] == pytest.approx(fitted.predict(table[-1:])[0], abs=1e-5)


def term(number, x):
    return min(v if number >> (len(x) - 1 - i) & 1 else 1 - v for i, v in enumerate(x))


def test_settings_are_chosen_where_a_function_misses_itself():
    """With the function itself among them, the narrowest and the least penalty would be best."""
    task = FuzzyLogic(held_out=0.7)
    batch, rows = task.batch("validation", function_baselines.CHOSEN_ON, seed=0, step=0), task.functions("train")
    known, y, wanted = values(batch.inputs[..., :-1], rows), batch.inputs[:, :-1, -1].double(), batch.targets[:, -1, 0]
    own = (batch.latents["terms"][:, None] == rows).all(dim=-1)
    for baseline, grid, chosen in zip((recall, mix), (WIDTHS, PENALTIES), settings(task), strict=True):
        for without, best in ((own, chosen), (None, grid[0])):
            errors = [(baseline(known, y, value, without) - wanted).square().mean() for value in grid]
            assert grid[int(torch.stack(errors).argmin())] == best
        assert grid[0] < chosen < grid[-1]  # the grid holds it


def test_a_single_training_function_leaves_nothing_to_choose_by():
    task = FuzzyLogic(held_out=0.99, split="legacy")
    assert len(task.functions("train")) == 1
    found = task.baselines("iid", sequences=20)
    assert found["recall"].mean == pytest.approx(1)
    assert found["mix"].mean > 0.9
