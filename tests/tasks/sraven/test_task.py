"""Symbolic Raven: the contents of a batch, random streams, loss, metrics."""

import itertools

import pytest
import torch

from polyhead import config
from polyhead.tasks import Sraven

SPLITS = ("train", "validation", "iid", "compositional")
SETTINGS = [
    {},
    {"permuted": False},
    {"features": 2, "values": 5},
    {"features": 3, "values": 4, "grid": 4, "held_out": 0.4},
    {"features": 3, "values": 3, "grid": 2},
]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_what_a_batch_holds(setting, split):
    task = Sraven(**setting)
    batch = task.sample(split, 50, generator(3))
    check_instances(task, batch)
    assert set(map(tuple, batch.latents["rules"].tolist())) <= set(map(tuple, task.rules(split).tolist()))
    assert task.ends == (config.Vectors(task.values), config.Logits(task.values, bias=True))


def check_instances(task, batch):
    """Latents, tokens and targets are those of one instance."""
    m, k, g, count = task.features, task.values, task.grid, len(batch.inputs)
    panels, rules, order = (batch.latents[name] for name in ("panels", "rules", "permutations"))
    assert batch.inputs.shape == (count, g * g * m, k)
    assert (batch.inputs.dtype, batch.targets.dtype, batch.scored.dtype) == (torch.float32, torch.int64, torch.bool)
    assert batch.mask is None
    assert (batch.targets == panels.flatten(1)).all()  # panels in reading order, features as shown
    assert (batch.inputs[:, -m:] == 0).all()
    assert (batch.inputs[:, :-m].sum(dim=-1) == 1).all()
    assert (batch.inputs[:, :-m].argmax(dim=-1) == batch.targets[:, :-m]).all()
    assert (batch.scored == (torch.arange(task.length) >= task.length - task.tail)).all()
    assert task.tail == m
    assert (order.sort(dim=-1).values == torch.arange(m)).all()
    assert (order == torch.arange(m)).all() == (not task.permuted)
    for b, j in itertools.product(range(count), range(m)):
        assert batch.latents["query_rules"][b, j] == rules[b, order[b, -1, j]]


def test_scores_are_of_the_query_tokens_and_accuracy_wants_all_of_them():
    task = Sraven()
    batch = task.batch("train", 5, seed=0, step=0)
    outputs = torch.nn.functional.one_hot(batch.targets, 8).float()
    for b in range(5):  # b of the four are wrong
        outputs[b, 36 - b :] = outputs[b, 36 - b :].roll(1, dims=-1)
    log_probabilities = outputs.log_softmax(-1).gather(-1, batch.targets[..., None])[:, 32:]
    outputs[:, :32] = float("nan")
    torch.testing.assert_close(task.loss(outputs, batch), -log_probabilities.mean())
    scores = task.metrics(outputs, batch)
    assert scores["accuracy"].tolist() == [1, 0, 0, 0, 0]
    assert scores["feature_accuracy"].tolist() == [1, 0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize("permuted", [False, True])
def test_input_sizes_are_sums_over_the_panels_to_the_left_of_the_answer(permuted):
    """Of the feature that the last token shows, wherever these panels show it."""
    task = Sraven(permuted=permuted)
    batch = task.sample("train", 20, generator(1))
    panels, order = batch.latents["panels"], batch.latents["permutations"]
    for i, size in enumerate(task.input_sizes(batch).tolist()):
        feature = order[i, 2, 3]
        symbols = [panels[i, 2, column, order[i, column].tolist().index(feature)].item() for column in (0, 1)]
        assert size == sum(symbols)
