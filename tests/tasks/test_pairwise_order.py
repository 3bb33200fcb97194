"""Pairwise order: labels, the split of the pairs."""

import itertools

import pytest

from polyhead.tasks import PairwiseOrder

SPLITS = ("train", "validation", "compositional")


def pairs(task, split):
    return list(map(tuple, task.pairs_of(split).tolist()))


@pytest.mark.parametrize("split", ["ordered", "unordered"])
def test_pairs_are_dealt_once(split):
    task = PairwiseOrder(10, split=split)
    every = [pair for name in SPLITS for pair in pairs(task, name)]
    assert len(every) == 90
    assert set(every) == set(itertools.permutations(range(10), 2))
    together = [all((j, i) in found for i, j in found) for found in (set(pairs(task, name)) for name in SPLITS)]
    assert together == [split == "unordered"] * 3


def test_shares_are_those_of_the_paper():
    assert [round(len(pairs(PairwiseOrder(), split)) / 4032, 2) for split in SPLITS] == [0.5, 0.15, 0.35]
    assert [len(pairs(PairwiseOrder(examples=100), split)) for split in SPLITS] == [100, 604, 1412]
    assert set(pairs(PairwiseOrder(examples=100), "train")) < set(pairs(PairwiseOrder(), "train"))


@pytest.mark.parametrize("split", SPLITS)
def test_labels_follow_from_the_vectors(split):
    task = PairwiseOrder(12, dim=3)
    batch = task.batch(split, 200, seed=0, step=0)
    assert batch.inputs.shape == (200, 2, 3)
    assert batch.targets.shape == batch.scored.shape == (200, 1)
    vectors, seen = task.vectors(), set()
    for both, label in zip(batch.inputs, batch.targets[:, 0].tolist(), strict=True):
        i, j = (int((vectors == vector).all(dim=1).nonzero()) for vector in both)
        assert label == (i < j)
        seen.add((i, j))
    assert seen <= set(pairs(task, split))
    assert len(seen) > 0.9 * len(pairs(task, split))
