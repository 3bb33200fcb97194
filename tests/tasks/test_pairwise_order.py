"""Pairwise order: labels, the split of the pairs."""

import doctest
import itertools

import pytest
import torch

from polyhead import config
from polyhead.tasks import KINDS, PairwiseOrder, pairwise_order

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
    assert pairs(task, "train") != pairs(PairwiseOrder(10, split=split, split_seed=1), "train")
    assert doctest.testmod(pairwise_order).failed == 0


def test_pairs_are_the_callers_own():
    task = PairwiseOrder(10)
    task.pairs_of("compositional").zero_()
    task.pairs_of("train").zero_()
    assert (task.pairs_of("compositional").diff(dim=1) != 0).all()
    assert (PairwiseOrder(10).batch("train", 20, seed=0, step=0).latents["objects"].diff(dim=1) != 0).all()


def test_shares_are_those_of_the_paper():
    sizes = PairwiseOrder().sizes
    assert [round(size / 4032, 2) for size in sizes.values()] == [0.5, 0.15, 0.35]
    assert PairwiseOrder(examples=100).sizes == {**sizes, "train": 100}
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
    assert len(seen) > 0.9 * task.sizes[split]
    first, again, other = (task.batch(split, 50, seed=0, step=step).inputs for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("objects", "split"), [(4, "ordered"), (5, "unordered")])
def test_the_fewest_objects_leave_pairs_for_every_split(objects, split):
    assert min(PairwiseOrder(objects, split=split).sizes.values()) > 0


def test_loss_metrics_and_settings():
    task = PairwiseOrder()
    batch = task.batch("train", 50, seed=0, step=0)
    right = torch.nn.functional.one_hot(batch.targets, 2).float()
    assert task.metrics(right, batch)["accuracy"].tolist() == [1.0] * 50
    assert task.metrics(1 - right, batch)["accuracy"].sum() == 0
    torch.testing.assert_close(task.loss(0 * right, batch), torch.tensor(2.0).log())
    run = config.Run(task, config.TransformerConfig(*task.ends))
    assert config.from_dict(config.to_dict(run), KINDS) == run
    for settings, text in (
        ({"examples": 2017}, "examples must be at most 2016"),
        ({"examples": 0}, "examples must be at least 1 but is 0"),
        ({"objects": 3}, "objects must be at least 4 but is 3"),
        ({"objects": 4, "split": "unordered"}, "objects must be at least 5 but is 4"),
        ({"split": "order"}, "unknown split 'order'; did you mean 'ordered'"),
    ):
        with pytest.raises(ValueError, match=f"^PairwiseOrder: {text}"):
            PairwiseOrder(**settings)
