"""Floors and ceiling: against scikit-learn, brute force, and known values."""

import itertools

import numpy as np
import pytest
import torch

from polyhead.config import Batch
from polyhead.tasks import FuzzyLogic, Score
from polyhead.tasks.fuzzy_logic import function_floors
from polyhead.tasks.fuzzy_logic.floors import LENGTH_SCALE, NOISE, PENALTY, ceiling, floors, predictions
from polyhead.tasks.fuzzy_logic.task import zadeh

NAMES = ["context_mean", "nearest_neighbour", "ridge", "gaussian_process"]


# ------------------------------------------------------------------------------------------ predictions
@pytest.mark.parametrize("length", [3, 6, 32])
def test_every_floor_is_scikit_learns(length):
    assert (PENALTY, LENGTH_SCALE, NOISE) == (1.0, 0.5, 0.01)
    task = FuzzyLogic(length=length)
    batch = task.batch("novel", 20, seed=0, step=0)
    ours, theirs = (predictions(batch, library=library) for library in ("torch", "sklearn"))
    assert list(ours) == list(theirs) == NAMES
    for name, guesses in ours.items():
        torch.testing.assert_close(guesses, theirs[name], rtol=0, atol=1e-9)
    table = floors(task, "novel", sequences=20, library="sklearn")
    assert list(table) == [*NAMES, "recall", "mix", "ceiling"]
    assert table["ridge"].mean == pytest.approx(floors(task, "novel", sequences=20)["ridge"].mean, abs=1e-7)


def test_a_floor_sees_the_context_alone():
    task = FuzzyLogic(length=8)
    batch = task.batch("iid", 6, seed=0, step=0)
    shown = batch.inputs.clone()
    shown[:, -1, -1] = 0.7  # in the place of the hidden target
    cheat = Batch(shown, torch.full_like(batch.targets, float("nan")), None, batch.scored, {})

    def guesses(batch):
        exact = {"ceiling": ceiling(task, batch)[0]}
        return predictions(batch) | function_floors.predictions(task, batch) | exact

    for name, guess in guesses(batch).items():
        assert (guesses(cheat)[name] == guess).all(), name


# ------------------------------------------------------------------------------------------ figures
@pytest.mark.parametrize(
    ("length", "known"),
    [
        (16, {"context_mean": -0.133, "nearest_neighbour": 0.076, "ridge": 0.179, "gaussian_process": 0.50}),
        (32, {"context_mean": -0.063, "nearest_neighbour": 0.379, "ridge": 0.336, "gaussian_process": 0.785}),
        pytest.param(
            *(64, {"context_mean": -0.026, "nearest_neighbour": 0.576, "ridge": 0.415, "gaussian_process": 0.905}),
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_the_known_figures_on_held_out_functions(length, known):
    task = FuzzyLogic(length=length, held_out=0.7, split="partitionable")
    found = task.floors("compositional", sequences=4000)
    for name, figure in known.items():
        assert abs(found[name].mean - figure) < 3 * found[name].standard_error, name
        assert found[name].count == 4000
    assert found["gaussian_process"].standard_error < 0.016


def test_the_exact_ceiling_at_32_and_16_examples():
    at_32 = floors(FuzzyLogic(), "compositional", sequences=1000)["ceiling"]
    assert at_32 == Score(mean=1.0, standard_error=0.0, count=1000, identified=1.0)
    at_16 = floors(FuzzyLogic(length=16), "compositional", sequences=4000)["ceiling"]
    assert at_16.identified == pytest.approx(0.9925, abs=3 * (0.9925 * 0.0075 / 4000) ** 0.5)
    assert 0.99 < at_16.mean < 1
    table = floors(FuzzyLogic(length=8), "compositional", sequences=1000)
    assert table["ceiling"].identified < 0.9
    assert all(table["ceiling"].mean > table[name].mean for name in NAMES)
    assert all(table[name].identified is None for name in NAMES)


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


def test_score_is_mean_and_standard_error():
    values = torch.tensor([0.1, 0.5, 0.9, -0.3, 0.2])
    score = Score.of(values)
    assert score.mean == pytest.approx(values.mean().item())
    assert score.standard_error == pytest.approx(np.std(values.numpy(), ddof=1) / 5**0.5)
    assert score.count == 5
    assert np.isnan(Score.of(values[:1]).standard_error)


def test_sequences_are_drawn_in_chunks_and_repeat():
    task = FuzzyLogic()
    first = floors(task, "train", sequences=501, seed=3)
    assert first["ridge"].count == 501
    assert first == floors(task, "train", sequences=501, seed=3)
    assert first["ridge"].mean != floors(task, "train", sequences=501, seed=4)["ridge"].mean


def test_mistakes_are_one_clear_line():
    task = FuzzyLogic()
    with pytest.raises(ValueError, match=r"FuzzyLogic: unknown split 'test' .*choose from train, validation"):
        floors(task, "test")
    with pytest.raises(ValueError, match=r"floors: unknown library 'scikit' .*choose from torch, sklearn"):
        floors(task, "iid", library="scikit")
    with pytest.raises(ValueError, match=r"floors: sequences must be at least 1 but is 0"):
        floors(task, "iid", sequences=0)
    with pytest.raises(ValueError, match=r"floors: 1 examples leave \d+ functions of 3 terms possible.*longer context"):
        floors(FuzzyLogic(variables=7, terms=3, length=2), "iid", sequences=50)
