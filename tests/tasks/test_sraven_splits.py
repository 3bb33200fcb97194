"""Symbolic Raven: the multisets of rules of each split, the original splits, invalid settings."""

import itertools
import math

import numpy as np
import pytest
import torch

from polyhead.tasks import Sraven
from polyhead.tasks.sraven import task as sraven

SETTINGS = [
    *({"held_out": held_out, "split_seed": seed} for held_out in (0.1, 0.25, 0.5, 0.75, 0.95) for seed in range(4)),
    *({"split": name, "split_seed": seed} for name in ("legacy", "partitionable") for seed in (0, 1, 2, 2024)),
    {"features": 2, "values": 5},
    *({"features": 2, "held_out": 0.7, "split_seed": seed} for seed in range(8)),  # two orders in three lack a rule
    {"features": 3, "grid": 4},
    {"features": 6},
]


def multisets(task):
    return {split: list(map(tuple, task.rules(split).tolist())) for split in task.splits}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_splits_never_share_a_multiset_and_lose_none(setting):
    task = Sraven(**setting)
    found = multisets(task)
    everything = list(itertools.combinations_with_replacement(range(8), task.features))
    assert task.splits == ("train", "validation", "iid", "compositional")
    assert found["validation"] == found["iid"] == found["train"]
    assert not set(found["train"]) & set(found["compositional"])
    assert sorted(found["train"] + found["compositional"]) == everything
    assert len(found["compositional"]) == math.floor(task.held_out * len(everything) + 1e-9)
    assert set(itertools.chain(*found["train"])) == set(range(8))


def test_splits_repeat_and_depend_on_their_seed():
    first = [multisets(Sraven(split_seed=seed)) for seed in range(3)]
    sraven._split.cache_clear()
    sraven._multisets.cache_clear()
    assert [multisets(Sraven(split_seed=seed)) for seed in range(3)] == first
    assert len({tuple(sorted(split["train"])) for split in first}) == 3
    assert sorted(first[0]["compositional"])[:4] == [(0, 0, 1, 3), (0, 0, 1, 6), (0, 0, 2, 4), (0, 0, 2, 6)]
    assert (len(first[0]["train"]), len(first[0]["compositional"])) == (248, 82)  # as in the paper


@pytest.mark.parametrize("name", ["legacy", "partitionable"])
@pytest.mark.parametrize("seed", [0, 1, 2, 2024])
def test_the_original_codes_splits(fixtures, name, seed):
    data = np.load(fixtures / "hyla_splits.npz")
    task = Sraven(split=name, split_seed=seed)
    for ours, theirs in (("train", "train"), ("iid", "train"), ("compositional", "ood")):
        assert task.rules(ours).tolist() == data[f"raven/{name}/seed{seed}/{theirs}"].tolist()


def test_one_feature_holds_out_rules_not_combinations():
    task = Sraven(features=1, held_out=0.25)
    assert task.splits == ("train", "validation", "iid", "novel")
    known, unknown = (set(task.rules(split).flatten().tolist()) for split in ("iid", "novel"))
    assert (len(known), len(unknown), known & unknown) == (6, 2, set())
    batch = task.batch("novel", 500, seed=0, step=0)
    assert set(batch.latents["rules"].flatten().tolist()) == unknown
    assert (batch.inputs.shape, batch.scored.sum(1).unique().tolist()) == ((500, 9, 8), [1])
    with pytest.raises(ValueError, match=r"Sraven: unknown split 'compositional'"):
        task.sample("compositional", 1, torch.Generator())
