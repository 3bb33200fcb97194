"""The whole network against arrays of the HYLA paper's own code: outputs, gradients and five optimiser steps."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import polyhead as ph
from polyhead.tasks import FuzzyLogic
from polyhead.train.optimiser import build, learning_rate

HEADS = [ph.Hyla(8, dim=2, value_dim=2)]
PARTS = {"feedforward": ph.Mlp(256, "gelu_tanh"), "positions": ph.RelativeBias(), "norm_eps": 1e-6, "bias": True}
SETTINGS = ph.TransformerConfig(ph.Vectors(5), ph.Values(1), dim=128, heads=HEADS, max_length=32, init="hyla", **PARTS)


def to_state(arrays, prefix):
    """Flax parameters (in, ...) under `prefix` as our state dict: matrices transposed, q/k/v stacked by head."""
    p = {k.removeprefix(prefix): torch.from_numpy(arrays[k]) for k in arrays.files if k.startswith(prefix)}
    state = {
        "inputs.linear.weight": p["embedding/kernel"].T,
        "inputs.linear.bias": p["embedding/bias"],
        "norm.weight": p["decoder_norm/scale"],
        "norm.bias": p["decoder_norm/bias"],
        "outputs.linear.weight": p["logitdense/kernel"].T,
        "outputs.linear.bias": p["logitdense/bias"],
    }
    for i in range(2):
        old, new = f"transformer_block_{i}", f"blocks.{i}"
        names = [f"{old}/sequence_mixer/{n}" for n in ("query", "key", "value")]
        state |= {
            f"{new}.attention.qkv.weight": torch.cat([p[f"{n}/kernel"].flatten(1).T for n in names]),
            f"{new}.attention.qkv.bias": torch.cat([p[f"{n}/bias"].flatten() for n in names]),
            f"{new}.attention.out.weight": p[f"{old}/sequence_mixer/out/kernel"].flatten(0, 1).T,
            f"{new}.attention.out.bias": p[f"{old}/sequence_mixer/out/bias"],
            f"{new}.attention.relative.table": p[f"{old}/relative_embedding/rel_embedding"],
            f"{new}.feedforward.up.weight": p[f"{old}/state_mixer/Dense_0/kernel"].T,
            f"{new}.feedforward.up.bias": p[f"{old}/state_mixer/Dense_0/bias"],
            f"{new}.feedforward.down.weight": p[f"{old}/state_mixer/Dense_1/kernel"].T,
            f"{new}.feedforward.down.bias": p[f"{old}/state_mixer/Dense_1/bias"],
        }
        for j in (1, 2):
            state[f"{new}.norm{j}.weight"] = p[f"{old}/norm{j}/scale"]
            state[f"{new}.norm{j}.bias"] = p[f"{old}/norm{j}/bias"]
    return {k: v.contiguous() for k, v in state.items()}


@pytest.fixture
def original(fixtures):
    return np.load(fixtures / "hyla_model_logic_linear_hypatt.npz")


@pytest.fixture
def model(original):
    model = ph.Transformer(SETTINGS)
    model.load_state_dict(to_state(original, "init/"))
    return model


def loss_of(model, original, step):
    x, y = torch.from_numpy(original["x"][step]), torch.from_numpy(original["y"][step])
    return (model(x)[:, -1] - y).square().mean()


def test_outputs_loss_and_score_at_the_start(model, original):
    task = FuzzyLogic()
    x, y = torch.from_numpy(original["x"][0]), torch.from_numpy(original["y"][0])
    batch = task.batch("train", 16, seed=0, step=0)
    targets = torch.cat([x[:, :-1, -1:], y[:, None]], dim=1)
    batch = type(batch)(inputs=x, targets=targets, mask=None, scored=batch.scored, latents=batch.latents)
    outputs = model(x)
    assert_close(outputs, torch.from_numpy(original["logits0"]), atol=1e-5, rtol=1e-5)
    assert_close(task.metrics(outputs, batch)["r2"].mean(), torch.tensor(original["metric0_r2"]), atol=1e-5, rtol=1e-4)
    assert_close(task.loss(outputs, batch), torch.tensor(original["loss0"]), atol=1e-6, rtol=1e-5)


def test_every_gradient(model, original):
    loss_of(model, original, 0).backward()
    expected = to_state(original, "grad0/")
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected.pop(name), atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert not expected


def test_five_steps_of_the_original_optimiser(model, original):
    """AdamW with decay on everything that is not a Flax vector: matrices, relative-bias tables and the q/k/v biases."""
    decay = ph.Decay(qkv_biases=True, relative_bias=True)
    train = ph.Train(steps=64, lr=1e-3, weight_decay=0.1, warmup=2, early_floor=True, decay=decay)
    optimiser = build(model, train)
    losses, schedule = [], []
    for step in range(5):
        rate = learning_rate(step, train)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad()
        loss = loss_of(model, original, step)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
        schedule.append(rate)
    rates = torch.from_numpy(original["lr_schedule"][:5]).double()
    assert_close(torch.tensor(schedule).double(), rates, atol=1e-9, rtol=1e-5)
    expected = torch.from_numpy(original["train_losses"]).double()
    assert_close(torch.stack(losses).double(), expected, atol=1e-6, rtol=4e-5)
    expected = to_state(original, "final/")
    for name, parameter in model.state_dict().items():
        assert_close(parameter, expected[name], atol=3e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
