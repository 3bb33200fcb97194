"""Baselines and ceiling: against scikit-learn, brute force, and known values."""

import itertools

import pytest
import torch
from refusals import refusing

from polyhead.config import Batch
from polyhead.tasks import FuzzyLogic, Score
from polyhead.tasks.fuzzy_logic.baselines import LENGTH_SCALE, NOISE, PENALTY, baselines, ceiling, predictions
from polyhead.tasks.fuzzy_logic.task import zadeh

NAMES = ["context_mean", "nearest_neighbour", "ridge", "gaussian_process"]


# ------------------------------------------------------------------------------------------ predictions
@pytest.mark.parametrize("length", [3, 6, 32])
def test_every_baseline_is_scikit_learns(length):
    assert (PENALTY, LENGTH_SCALE, NOISE) == (1.0, 0.5, 0.01)
    task = FuzzyLogic(length=length)
    batch = task.batch("novel", 20, seed=0, step=0)
    shown = batch.inputs.clone()
    shown[:, -1, -1] = 0.7  # in the place of the hidden target, which no baseline sees
    unseen = Batch(shown, torch.full_like(batch.targets, float("nan")), None, batch.scored, {})
    ours, theirs = predictions(unseen), predictions(batch, library="sklearn")
    assert list(ours) == list(theirs) == NAMES
    for name, guesses in ours.items():
        torch.testing.assert_close(guesses, theirs[name], rtol=0, atol=1e-9)
    table = baselines(task, "novel", sequences=20, library="sklearn")
    assert list(table) == [*NAMES, "recall", "mix", "ceiling"]
    assert table["ridge"].mean == pytest.approx(baselines(task, "novel", sequences=20)["ridge"].mean, abs=1e-7)


# ------------------------------------------------------------------------------------------ figures
KNOWN = {
    16: {"context_mean": -0.133, "nearest_neighbour": 0.076, "ridge": 0.179, "gaussian_process": 0.50},
    32: {"context_mean": -0.063, "nearest_neighbour": 0.379, "ridge": 0.336, "gaussian_process": 0.785},
    64: {"context_mean": -0.026, "nearest_neighbour": 0.576, "ridge": 0.415, "gaussian_process": 0.905},
}


@pytest.mark.parametrize("length", [16, 32, pytest.param(64, marks=pytest.mark.campaign)])
def test_the_known_figures_on_held_out_functions(length):
    task = FuzzyLogic(length=length, held_out=0.7, split="partitionable")
    found = task.baselines("compositional", sequences=4000)
    for name, figure in KNOWN[length].items():
        assert abs(found[name].mean - figure) < 3 * found[name].standard_error, name
        assert (found[name].count, found[name].identified) == (4000, None)
    assert found["gaussian_process"].standard_error < 0.016
    single = 0.9925 if length == 16 else 1.0  # the share of contexts that fit a single function
    assert found["ceiling"].identified == pytest.approx(single, abs=3 * (single * (1 - single) / 4000) ** 0.5)
    assert 0.99 < found["ceiling"].mean <= 1
    assert (found["ceiling"].mean == 1) == (single == 1)


@pytest.mark.parametrize(("variables", "terms", "length"), [(4, 2, 3), (4, 2, 6), (4, 2, 16), (3, 2, 4), (4, 3, 7)])
def test_the_ceiling_is_the_mean_over_all_functions_that_agree(variables, terms, length):
    task = FuzzyLogic(variables=variables, terms=terms, length=length)
    batch = task.batch("compositional", 40, seed=0, step=0)
    everything = torch.tensor(list(itertools.combinations(range(2**variables), terms)))
    found, count = ceiling(task, batch)
    for b in range(40):
        x = batch.inputs[b, :, :-1].expand(len(everything), -1, -1)
        values = zadeh(x, everything)
        agree = (values[:, :-1] == batch.targets[b, :-1, 0]).all(dim=1)
        assert count[b] == agree.sum() >= 1
        torch.testing.assert_close(found[b], values[agree, -1].double().mean())


# ------------------------------------------------------------------------------------------ the surface
def test_a_score_over_splits_is_uncertain_by_splits_and_by_sequences():
    over = Score.over([Score(0.6, 0.3, 10, 0.5), Score(1.0, 0.1, 20, 1.0)])
    assert (over.mean, over.standard_error, over.count, over.identified) == pytest.approx((0.8, 0.2, 30, 0.75))
    assert Score.over([Score(0.5, 0.3, 9)] * 4) == Score(0.5, 0.15, 36)  # equal by chance, not sure
    assert Score.over([Score(0.5, 0.3, 9)]) == Score(0.5, 0.3, 9)


def test_mistakes_are_one_clear_line():
    with refusing("baselines: unknown library 'scikit' (choose from torch, sklearn)"):
        baselines(FuzzyLogic(), "iid", library="scikit")
    with refusing("functions of 3 terms possible, but the ceiling can enumerate at most 200000; use a longer context"):
        baselines(FuzzyLogic(variables=7, terms=3, length=2), "iid", sequences=50)
