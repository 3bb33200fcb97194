"""Which combinations, of terms or of rules, each split has: coverage, completeness, the original splits."""

import itertools
import math

import numpy as np
import pytest
import torch

from polyhead.tasks import FuzzyLogic, Sraven

FUNCTIONS = [
    {"held_out": 0.3, "split_seed": 1},
    {"held_out": 0.91, "split_seed": 3},  # 6 functions
    {"variables": 3, "unknown": 0.5, "held_out": 0.6},
    {"variables": 5, "terms": 3, "held_out": 0.95},
    {"variables": 5, "terms": 3, "held_out": 0.996},
    {"variables": 5, "held_out": 11 / 276},  # times 276 a little less than 11
    {"variables": 6, "terms": 2, "held_out": 0.9},
]
MULTISETS = [
    {"held_out": 0.1, "split_seed": 1},
    {"held_out": 0.95, "split_seed": 2},
    {"split": "legacy", "split_seed": 2024},
    {"features": 2, "held_out": 0.7, "split_seed": 1},  # two orders in three lack a rule
    {"features": 3, "grid": 4},
    {"features": 6},
]


def check(task, combinations_of, expected):
    """The `expected` combinations are in training or, as many as asked, held out; training has all of their parts."""
    by_split = {split: list(map(tuple, combinations_of(split).tolist())) for split in task.splits}
    assert by_split["validation"] == by_split["iid"] == by_split["train"]
    assert sorted(by_split["train"] + by_split["compositional"]) == expected
    assert len(by_split["compositional"]) == math.floor(task.held_out * len(expected) + 1e-9)
    assert set(itertools.chain(*by_split["train"])) == set(itertools.chain(*expected))
    assert combinations_of("train").dtype == torch.int64
    return by_split


@pytest.mark.parametrize("setting", FUNCTIONS, ids=str)
def test_functions_of_fuzzy_logic(setting):
    task = FuzzyLogic(**setting)
    terms = 2**task.variables
    known = terms - math.floor(task.unknown * terms)
    by_split = check(task, task.functions, list(itertools.combinations(range(known), task.terms)))
    assert task.splits == ("train", "validation", "iid", "compositional", "novel")
    assert by_split["novel"] == list(itertools.combinations(range(known, terms), task.terms))


@pytest.mark.parametrize("setting", MULTISETS, ids=str)
def test_multisets_of_rules(setting):
    task = Sraven(**setting)
    check(task, task.rules, list(itertools.combinations_with_replacement(range(8), task.features)))
    assert task.splits == ("train", "validation", "iid", "compositional")


def test_one_feature_holds_out_rules_not_combinations():
    task = Sraven(features=1, held_out=0.25)
    assert task.splits == ("train", "validation", "iid", "novel")
    known, unknown = (set(task.rules(split).flatten().tolist()) for split in ("iid", "novel"))
    assert (len(known), len(unknown), known & unknown) == (6, 2, set())
    batch = task.batch("novel", 500, seed=0, step=0)
    assert set(batch.latents["rules"].flatten().tolist()) == unknown
    assert (batch.inputs.shape, batch.scored.sum(1).unique().tolist()) == ((500, 9, 8), [1])


@pytest.mark.parametrize("name", ["legacy", "partitionable"])
@pytest.mark.parametrize("seed", [0, 1, 2, 2024])
def test_the_original_codes_splits(fixtures, name, seed):
    data = np.load(fixtures / "hyla_splits.npz")
    for share in (0.3, 0.5, 0.7):
        task, stem = FuzzyLogic(split=name, split_seed=seed, held_out=share), f"logic/{name}/seed{seed}/frac{share}"
        for split, original in (("train", "train"), ("iid", "train"), ("compositional", "test"), ("novel", "unknown")):
            assert task.functions(split).tolist() == data[f"{stem}/{original}"].tolist()
    task = Sraven(split=name, split_seed=seed)
    for split, original in (("train", "train"), ("iid", "train"), ("compositional", "ood")):
        assert task.rules(split).tolist() == data[f"raven/{name}/seed{seed}/{original}"].tolist()
