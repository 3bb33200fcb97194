"""Fuzzy logic: the Zadeh operators, the contents of a batch, random streams, loss and metrics."""

import itertools

import numpy as np
import pytest
import torch

from polyhead import config
from polyhead.tasks import FuzzyLogic
from polyhead.tasks.fuzzy_logic.task import zadeh

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
SPLITS = ("train", "validation", "iid", "compositional", "novel")


def test_the_original_code_gives_the_same_targets(fixtures):
    data = np.load(fixtures / "hyla_gen_logic.npz")
    bits = 2 ** np.arange(3, -1, -1)
    assert (data["conjunctions_all"] @ bits == np.arange(16)).all()
    terms = torch.from_numpy(data["latents"] @ bits).long()
    outputs = zadeh(torch.from_numpy(data["inputs"]), terms)
    torch.testing.assert_close(outputs, torch.from_numpy(data["targets"])[..., 0], rtol=0, atol=0)


@pytest.mark.parametrize("setting", [{}, {"variables": 3, "length": 9}, {"variables": 5, "terms": 3, "held_out": 0.3}])
@pytest.mark.parametrize("split", SPLITS)
def test_what_a_batch_holds(setting, split):
    task = FuzzyLogic(**setting)
    batch = task.sample(split, 50, torch.Generator().manual_seed(3))
    x, y, terms = batch.inputs[..., :-1], batch.inputs[..., -1], batch.latents["terms"]
    assert batch.inputs.shape == (50, task.length, task.variables + 1)
    assert batch.inputs.dtype == batch.targets.dtype == torch.float32
    assert batch.mask is None
    assert set(batch.latents) == {"terms"}
    torch.testing.assert_close(batch.targets[..., 0], zadeh(x, terms), rtol=0, atol=0)
    assert (y[:, -1] == 0).all()
    assert (y[:, :-1] == batch.targets[:, :-1, 0]).all()
    assert (batch.targets[:, -1] > 0).all()  # the hidden one is the truth
    assert batch.scored.dtype == torch.bool
    assert batch.scored.sum(dim=1).tolist() == [1] * 50
    assert batch.scored[:, -1].all()
    assert set(map(tuple, terms.tolist())) <= set(map(tuple, task.functions(split).tolist()))
    assert task.ends == (config.Vectors(task.variables + 1), config.Values(1))


def test_a_fixed_context_depends_on_the_split_seed_alone_and_queries_are_free():
    """What is fitted on training functions is asked of unseen ones at the same inputs."""
    contexts = []
    for seed, split in itertools.product((0, 1), SPLITS):
        batch = FuzzyLogic(inputs="fixed_context", split_seed=seed).batch(split, 40, seed=0, step=seed)
        x = batch.inputs[..., :-1]
        assert (x[:, :-1] == x[0, :-1]).all()
        assert len(x.flatten(0, 1).unique(dim=0)) == 31 + 40
        assert (batch.targets[..., 0] == zadeh(x, batch.latents["terms"])).all()
        contexts.append(tuple(x[0, :-1].flatten().tolist()))
    assert len(set(contexts)) == 2
    assert len(set(contexts[: len(SPLITS)])) == 1


def test_scores_are_errors_at_the_query_and_r2_is_over_the_variance_of_all_targets():
    task = FuzzyLogic()
    batch = task.batch("train", 20, seed=0, step=0)
    outputs = torch.rand(20, 32, 1, generator=torch.Generator().manual_seed(0))
    outputs[:, :-1] = float("nan")
    scores, errors = task.metrics(outputs, batch), (outputs - batch.targets)[:, -1, 0]
    torch.testing.assert_close(task.loss(outputs, batch), errors.square().mean())
    for b, error in enumerate(errors.tolist()):
        y = batch.targets[b, :, 0].double().numpy()
        assert scores["mse"][b].item() == pytest.approx(error**2, rel=1e-5)
        assert scores["r2"][b].item() == pytest.approx(1 - error**2 / np.var(y), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_lies_on_its_device_and_has_a_known_context(device):
    task = FuzzyLogic(inputs="fixed_context")
    batch, repeated, other = (task.batch("train", 64, seed=0, step=step, device=device) for step in (0, 0, 1))
    assert batch.inputs.device.type == device
    assert (batch.inputs == repeated.inputs).all()
    assert (batch.inputs != other.inputs).any()
    assert (task.metrics(batch.targets, batch)["r2"] == 1).all()
    context_on_cpu = task.batch("train", 1, seed=0, step=0).inputs[0, :-1, :-1]
    assert (batch.inputs[:, :-1, :-1].cpu() == context_on_cpu).all()
