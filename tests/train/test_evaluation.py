"""Scores on finite and infinite splits."""

import math

import pytest
import torch

import polyhead as ph
from polyhead.tasks import Images, Maths
from polyhead.train.evaluation import evaluate, summary
from polyhead.train.network import predict


class Guess(torch.nn.Module):
    """Says of every image that it is a zero, surely."""

    def forward(self, inputs, *, mask=None):
        return torch.tensor([9.0] + [0.0] * 9).expand(len(inputs), 1, 10)


@pytest.mark.parametrize(("batches", "size", "sequences"), [(6, 64, 359), (100, 64, 359), (2, 64, 128), (1, 500, 359)])
def test_a_split_that_ends_is_scored_once(batches, size, sequences):
    scores = evaluate(Guess(), Images(), "iid", batches=batches, batch_size=size)
    assert scores["sequences"] == sequences
    if sequences == 359:
        batch = Images().batch("iid", 359, seed=0, step=0)
        assert scores["accuracy"] == pytest.approx((batch.targets == 0).double().mean().item(), abs=1e-12)
        assert scores["loss"] == pytest.approx(Images().loss(Guess()(batch.inputs), batch).item(), abs=1e-6)


def test_a_short_batch_counts_by_its_scored_positions():
    losses, metrics = [torch.tensor(1.0), torch.tensor(4.0)], {"right": [torch.ones(3), torch.zeros(1)]}
    scores = summary(losses, metrics, [torch.tensor(3), torch.tensor(1)], 4)
    assert scores == {"loss": 1.75, "right": 0.75, "right_se": 0.25, "sequences": 4}
    assert summary(losses, metrics, [torch.tensor(9), torch.tensor(1)], 4)["loss"] == pytest.approx(1.3)
    losses[1] = torch.tensor(math.nan)  # the mean of no position
    assert summary(losses, {}, [torch.tensor(2), torch.tensor(0)], 4)["loss"] == 1.0


def test_sequences_count_by_their_amounts():
    losses, values = [torch.tensor(1.0)] * 2, {"x": [torch.tensor([1.0, 2.0]), torch.tensor([5.0])]}
    scored = [torch.tensor(20), torch.tensor(5)]
    scores = summary(losses, values, scored, 3, [torch.tensor([10.0, 10.0]), torch.tensor([5.0])])
    assert scores["x"] == pytest.approx((10 * 1 + 10 * 2 + 5 * 5) / 25)
    squares = (10 * (1 - 2.2)) ** 2 + (10 * (2 - 2.2)) ** 2 + (5 * (5 - 2.2)) ** 2
    assert scores["x_se"] == pytest.approx(math.sqrt(3 / 2 * squares) / 25)
    equal_amounts = summary(losses, values, scored, 3, [torch.full((2,), 7.0), torch.full((1,), 7.0)])
    assert equal_amounts == pytest.approx(summary(losses, values, scored, 3))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("metrics", {"accuracy": torch.tensor(0.5)}, r"must be numbers \(3,\), one for each .*, but accuracy is \(\)$"),
        ("metrics", {"accuracy": torch.ones(3, 1)}, r"but accuracy is \(3, 1\)$"),
        ("metrics", {"accuracy": 0.5}, "but accuracy is float$"),
        ("metrics", {"accuracy": torch.ones(3), "loss": torch.ones(3)}, "no metric may be called 'loss'"),
        ("metrics", {"accuracy": torch.ones(3), "step": torch.ones(3)}, "no metric may be called 'step'"),
        ("metrics", {"accuracy": torch.ones(3), "accuracy_se": torch.ones(3)}, "no metric may be called 'accuracy_se'"),
        ("metrics", {"right": torch.ones(3)}, "its metric is 'accuracy', but its metrics are right$"),
        ("metrics", [0.5], r"metrics must be numbers \(3,\) by name but are a list$"),
        ("derived", [0.5], r"derived must be numbers by name but is \[0.5\]$"),
        ("derived", {"accuracy": 0.9}, "derived must not be called 'accuracy'"),
        ("derived", {"size": "large"}, "derived must be numbers by name but is {'size': 'large'}$"),
    ],
)
def test_scores_that_are_not_one_for_each_sequence_are_one_line(name, value, message, monkeypatch):
    monkeypatch.setattr(Images, name, lambda *_: value)
    with pytest.raises(ValueError, match=f"^Images: .*{message}"):
        evaluate(Guess(), Images(), "iid", batches=1, batch_size=3)
    for argument in ({"batches": 1.5}, {"batch_size": 0}, {"accumulate": None}, {"precision": "float16"}):
        with pytest.raises(ValueError, match=rf"^train.evaluate: .*{next(iter(argument))}"):
            evaluate(Guess(), Images(), "iid", **argument)


@pytest.fixture
def reader():
    """A task whose sequences have unequal numbers of scored positions, and a model of it."""
    task = Maths()
    sizes = {"dim": 16, "layers": 1, "heads": ph.Softmax(2), "positions": ph.Rotary()}
    encoder = ph.TransformerConfig(task.source, ph.Logits(2), max_length=task.source_length, **sizes)
    torch.manual_seed(0)
    ends = {"max_length": task.length, "causal": True, "encoder": encoder}
    return task, ph.Transformer(ph.TransformerConfig(*task.ends, **sizes, **ends))


@pytest.mark.parametrize("accumulate", [1, 3, 8])
def test_the_loss_is_that_of_all_scored_positions(reader, accumulate):
    """However a batch is cut."""
    task, model = reader
    batch = task.batch("iid", 8, seed=5, step=0)
    assert len(set(batch.scored.sum(dim=1).tolist())) > 1
    loss = evaluate(model, task, "iid", batches=1, batch_size=8, seed=5, accumulate=accumulate)["loss"]
    assert loss == pytest.approx(task.loss(predict(model, task, batch), batch).item(), abs=1e-6)


def test_every_module_keeps_its_mode(reader):
    task, model = reader
    model.train()
    model.encoder.eval()
    evaluate(model, task, "iid", batches=1, batch_size=2)
    assert (model.training, model.encoder.training) == (True, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_a_narrow_model_are_computed_in_float32(reader, dtype):
    task, model = reader
    outputs = predict(model.to(dtype), task, task.batch("iid", 2, seed=0, step=0))
    assert outputs.dtype == torch.float32
