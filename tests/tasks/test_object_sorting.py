"""Object sorting: orders by hand, the objects, the splits, loss and metrics."""

import itertools

import pytest
import torch

from polyhead.tasks import ObjectSorting
from polyhead.tasks.object_sorting import ranks


@pytest.mark.parametrize("objects", ["product", "random"])
@pytest.mark.parametrize("split", ["train", "validation", "iid"])
def test_targets_sort_the_vectors_that_are_read(objects, split):
    task = ObjectSorting(objects, length=6, examples=40)
    batch = task.batch(split, 30, seed=1, step=2)
    vectors = task.vectors()
    assert batch.source.shape == (30, 6, task.source.size)
    assert batch.scored.all()
    assert batch.mask is batch.source_mask is None
    for source, inputs, targets in zip(batch.source, batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        places = [int((vectors == vector).all(dim=1).nonzero()) for vector in source]
        assert len(set(places)) == 6
        assert [places[i] for i in targets] == sorted(places)
        assert inputs == [6, *targets[:-1]]


def test_products_are_ordered_by_their_first_part():
    vectors = ObjectSorting().vectors()
    assert vectors.shape == (48, 12)
    for i, j in itertools.combinations(range(48), 2):
        assert torch.equal(vectors[i, :4], vectors[j, :4]) == (i // 12 == j // 12)
        assert torch.equal(vectors[i, 4:], vectors[j, 4:]) == (i % 12 == j % 12)
    assert ObjectSorting("random").vectors().shape == (64, 8)
    assert abs(ObjectSorting("random").vectors().std() - 1) < 0.1
    assert not torch.equal(vectors, ObjectSorting(split_seed=1).vectors())


def sequences(batch):
    return set(map(tuple, batch.latents["objects"].tolist()))


def test_splits_share_no_sequence_and_training_is_a_set_of_so_many():
    task = ObjectSorting("random", length=2, examples=2000)  # of 4032
    train = set().union(*(sequences(task.batch("train", 3000, seed=s, step=0)) for s in range(9)))
    assert len(train) == 2000
    assert any((b, a) in train for a, b in train)  # another order is another sequence
    for split in task.splits[1:]:
        assert not train & sequences(task.batch(split, 300, seed=0, step=0))


def test_novel_vectors_are_off_by_noise():
    task = ObjectSorting(noise=0.5)
    batch = task.batch("novel", 400, seed=0, step=0)
    off = batch.source - task.vectors()[batch.latents["objects"]]
    assert abs(off.std() - 0.5) < 0.01
    assert abs(off.mean()) < 0.01
    assert torch.equal(batch.targets, ranks(batch.latents["objects"]))
    clean = ObjectSorting(noise=0.0).batch("novel", 5, seed=0, step=0)
    torch.testing.assert_close(clean.source, task.vectors()[clean.latents["objects"]], rtol=0, atol=0)


def test_loss_and_metrics_by_hand():
    task = ObjectSorting(length=2, examples=1)
    batch = task.batch("iid", 2, seed=0, step=0)
    batch.targets[:] = torch.tensor([[0, 1], [1, 0]])
    outputs = torch.tensor([[[3.0, 0.0], [0.0, 3.0]], [[0.0, 3.0], [0.0, 1.0]]])
    scores = task.metrics(outputs, batch)
    assert scores["accuracy"].tolist() == [1.0, 0.0]
    assert scores["element_accuracy"].tolist() == [1.0, 0.5]
    wanted = torch.nn.functional.softplus(torch.tensor([-3.0, -3.0, -3.0, 1.0])).mean()
    torch.testing.assert_close(task.loss(outputs, batch), wanted)
