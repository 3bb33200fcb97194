"""Fuzzy logic: the functions of each split, coverage, the original splits, invalid settings."""

import itertools
import math

import numpy as np
import pytest
import torch

from polyhead.tasks import FuzzyLogic
from polyhead.tasks.fuzzy_logic import task as fuzzy_logic

SETTINGS = [
    *({"held_out": held_out, "split_seed": seed} for held_out in (0.3, 0.5, 0.7) for seed in range(8)),
    *(
        {"held_out": held_out, "split_seed": seed} for held_out in (0.85, 0.91) for seed in range(4)
    ),  # 10 and 6 functions
    {"variables": 3},
    {"variables": 3, "unknown": 0.5, "held_out": 0.6},
    {"variables": 5, "terms": 3, "held_out": 0.95},
    {"variables": 5, "terms": 3, "held_out": 0.996},
    {"variables": 6, "terms": 2, "held_out": 0.9},
]


def functions(task):
    return {split: list(map(tuple, task.functions(split).tolist())) for split in task.splits}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_splits_are_disjoint_covered_and_complete(setting):
    task = FuzzyLogic(**setting)
    found = functions(task)
    known = 2**task.variables - math.floor(task.unknown * 2**task.variables)
    pairs = list(itertools.combinations(range(known), task.terms))
    assert task.splits == ("train", "validation", "iid", "compositional", "novel")
    assert found["validation"] == found["iid"] == found["train"]
    assert sorted(found["train"] + found["compositional"]) == pairs  # disjoint, and nothing is lost
    assert len(found["compositional"]) == math.floor(task.held_out * len(pairs) + 1e-9)
    assert set(itertools.chain(*found["train"])) == set(range(known))
    assert found["novel"] == list(itertools.combinations(range(known, 2**task.variables), task.terms))
    assert task.functions("train").dtype == torch.int64


def test_a_fraction_that_rounds_down_in_binary_still_counts_whole():
    assert 11 / 276 * 276 < 11
    assert len(FuzzyLogic(variables=5, held_out=11 / 276).functions("compositional")) == 11


def test_splits_repeat_and_depend_on_their_seed():
    first = [functions(FuzzyLogic(split_seed=seed)) for seed in range(3)]
    fuzzy_logic._split.cache_clear()
    fuzzy_logic._functions.cache_clear()
    assert [functions(FuzzyLogic(split_seed=seed)) for seed in range(3)] == first
    assert len({tuple(sorted(split["train"])) for split in first}) == 3
    assert sorted(first[0]["train"])[:8] == [(0, 1), (0, 3), (1, 2), (1, 3), (1, 6), (1, 7), (1, 9), (1, 10)]


def test_the_built_cover_holds_every_term_and_differs_by_seed(monkeypatch):
    monkeypatch.setattr(fuzzy_logic, "TRIES", 0)
    for seed, (known, terms, held_out) in itertools.product(range(20), [(12, 2, 0.9), (13, 2, 0.9), (24, 3, 0.996)]):
        train, held = fuzzy_logic._split.__wrapped__(known, terms, held_out, "covered", seed)
        assert len(train) + len(held) == math.comb(known, terms)
        assert set(train) | set(held) == set(itertools.combinations(range(known), terms))
        assert set(itertools.chain(*train)) == set(range(known))
    seeds = {frozenset(fuzzy_logic._split.__wrapped__(12, 2, 0.9, "covered", seed)[0]) for seed in range(20)}
    assert len(seeds) == 20


@pytest.mark.parametrize("name", ["legacy", "partitionable"])
@pytest.mark.parametrize("seed", [0, 1, 2, 2024])
@pytest.mark.parametrize("held_out", [0.3, 0.5, 0.7])
def test_the_original_codes_splits(fixtures, name, seed, held_out):
    data = np.load(fixtures / "hyla_splits.npz")
    task = FuzzyLogic(split=name, split_seed=seed, held_out=held_out)
    for ours, theirs in (("train", "train"), ("iid", "train"), ("compositional", "test"), ("novel", "unknown")):
        wanted = data[f"logic/{name}/seed{seed}/frac{held_out}/{theirs}"]
        assert task.functions(ours).tolist() == wanted.tolist()


def test_the_papers_seed_2_lacks_two_terms_in_training():
    trained = set(FuzzyLogic(split="legacy", split_seed=2, held_out=0.7).functions("train").flatten().tolist())
    assert set(range(12)) - trained == {5, 6}
