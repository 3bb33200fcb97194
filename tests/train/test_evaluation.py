"""Scores on finite and infinite splits."""

import pytest
import torch

from polyhead.tasks import Images
from polyhead.train.evaluation import evaluate, summary


class Guess(torch.nn.Module):
    """Says of every image that it is a zero, surely."""

    def forward(self, inputs, *, mask=None):
        return torch.tensor([9.0] + [0.0] * 9).expand(len(inputs), 1, 10)


@pytest.mark.parametrize(
    ("batches", "batch_size", "sequences"), [(6, 64, 359), (100, 64, 359), (2, 64, 128), (1, 500, 359)]
)
def test_a_split_that_ends_is_scored_once(batches, batch_size, sequences):
    scores = evaluate(Guess(), Images(), "iid", batches=batches, batch_size=batch_size)
    assert scores["sequences"] == sequences
    if sequences == 359:
        whole = Images().batch("iid", 359, seed=0, step=0)
        assert scores["accuracy"] == pytest.approx((whole.targets == 0).double().mean().item(), abs=1e-12)
        assert scores["loss"] == pytest.approx(Images().loss(Guess()(whole.inputs), whole).item(), abs=1e-6)


def test_training_does_not_end():
    assert evaluate(Guess(), Images(), "train", batches=20, batch_size=100)["sequences"] == 2000


def test_a_short_batch_counts_by_its_sequences():
    scores = summary([torch.tensor(1.0), torch.tensor(4.0)], {"right": [torch.ones(3), torch.zeros(1)]}, [3, 1])
    assert scores == {"loss": 1.75, "right": 0.75, "right_se": 0.25, "sequences": 4}
