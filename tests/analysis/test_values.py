"""The value network and the code of chosen pairs reproduce the layer's output."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from refusals import refusing
from zoo import variants

import polyhead as ph
from polyhead.analysis import capture, codes, value_network
from polyhead.ops.latent_code import act as activation
from polyhead.tasks.base import Batch

T, DIM = 8, 12

MIX = [ph.Softmax(2, dim=3, value_dim=5), ph.Hyla(3, dim=2, value_dim=4), ph.Linear(2, dim=4, value_dim=2, act="relu")]
MIXTURES = {
    "mixture": MIX,
    "mixture, shared values": [ph.Softmax(4, dim=3, value_dim=5, kv_heads=2), ph.Hyla(3, dim=2, value_dim=4)],
    "linear act, shared values": [ph.Linear(4, act="relu", kv_heads=2)],
    "hyla deep, shared values": [ph.Hyla(4, value_depth=2, kv_heads=2, act="silu")],
    "linear softmax_rms_heads gelu": [ph.Linear(4, normalise="softmax_rms_heads", act="gelu")],
    **{f"{kind} {i}": [group] for kind in ("Softmax", "Linear", "Hyla") for i, group in enumerate(variants(kind))},
}


def layer(heads: list, *, bias: bool = True) -> ph.MultiHeadAttention:
    torch.manual_seed(0)
    attention = ph.MultiHeadAttention(DIM, heads, bias=bias, max_length=T, dtype=torch.float64)
    with torch.no_grad():
        for parameter in attention.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return attention


def tap(attention: ph.MultiHeadAttention, *inputs: torch.Tensor) -> ph.Taps:
    taps: list[ph.Taps] = []
    with torch.no_grad():
        attention(*inputs, taps=taps)
    return taps[0]


QUERIES = [0, 2, 3]


def rebuilt(taps: ph.Taps, sample: int) -> torch.Tensor:
    """The layer's output from its value networks, by hand: the sum over keys and groups, plus the output bias."""
    rows = []
    for i in QUERIES:
        total = torch.zeros_like(taps.x[sample, 0]) if taps.b_out is None else taps.b_out.clone()
        for g, j in itertools.product(range(len(taps.groups)), range(taps.context.shape[1])):
            network = value_network(taps, i, j, sample=sample, group=g)
            y = taps.context[sample, j]
            for n, (matrix, bias) in enumerate(zip(network, network.biases, strict=True)):
                y = matrix @ (y if n == 0 else activation(network.act)(y)) + bias
            assert torch.allclose(y, network(taps.context[sample, j]), rtol=1e-12, atol=1e-12)
            total = total + y
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("name", MIXTURES)
def test_value_networks_summed_over_keys_are_the_layer(name: str) -> None:
    attention = layer(MIXTURES[name])
    taps = tap(attention, torch.randn(2, T, DIM, dtype=torch.float64))
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(taps, 1), taps.output[1, QUERIES], rtol=1e-9, atol=1e-9)
    attention.qkv, attention.out = torch.nn.Sequential(attention.qkv), torch.nn.Sequential(attention.out)
    wrapped = tap(attention, taps.x)
    torch.testing.assert_close(rebuilt(wrapped, 1), rebuilt(taps, 1), rtol=1e-9, atol=1e-9)


def test_cross_attention_and_no_biases() -> None:
    x, context = torch.randn(2, 4, DIM, dtype=torch.float64), torch.randn(2, T, DIM, dtype=torch.float64)
    taps = tap(layer([ph.Hyla(3)], bias=False), x, context)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(taps, 0), taps.output[0, QUERIES], rtol=1e-9, atol=1e-9)


# -------------------------------------------------------------------------------------------------------------- capture
def test_capture_reads_all_layers_without_dropout_and_leaves_the_modes(monkeypatch: pytest.MonkeyPatch):
    heads, noise = ((ph.Softmax(4),), (ph.Softmax(2), ph.Hyla(2))), {"dropout": 0.5, "residual_dropout": 0.5}
    model = ph.Transformer(ph.TransformerConfig(ph.Vectors(5), ph.Values(1), dim=16, layers=2, heads=heads, **noise))
    model.train().blocks[0].eval()
    modes = [module.training for module in model.modules()]
    x, mask = torch.randn(3, 6, 5), torch.ones(3, 6, dtype=torch.bool)
    mask[:, 0] = False
    batch = Batch(x, x[..., :1], mask, torch.ones(3, 6, dtype=torch.bool), {})
    first, second = capture(model, batch), capture(model, batch)
    assert [len(taps.groups) for taps in first] == [1, 2]
    assert first[0].groups[0].q.shape == (3, 6, 4, 4)
    assert not first[1].output.requires_grad
    assert all(torch.equal(a.output, b.output) for a, b in zip(first, second, strict=True))
    assert (codes(first[0], -1, 0) == 0).all()
    assert (codes(capture(model, dataclasses.replace(batch, mask=None))[0], -1, 0) != 0).all()
    monkeypatch.setattr(model.blocks[1], "forward", mock.Mock(side_effect=KeyError("broken")))
    with pytest.raises(KeyError):
        capture(model, batch)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.compile  # run without annotation checks, as users have it
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda taps: codes(taps, 8, 0), "codes: q_index must be an integer in [-8, 8) but is 8"),
        (lambda taps: codes(taps, 0, -9), "codes: k_index must be an integer in [-8, 8) but is -9"),
        (lambda taps: codes(taps, 0, 0, group=3), "codes: group must be an integer in [-3, 3) but is 3"),
        (lambda taps: codes(taps, [1], np.int64(2)), "codes: q_index and k_index must be two integers or two lists"),
        (lambda taps: codes(taps, torch.tensor(0), torch.tensor(1)), "must be two integers or two lists of one length"),
        (lambda taps: value_network(taps, [0], [0]), "value_network: q_index and k_index must be two integers"),
        (lambda taps: codes(taps, [0.5], [0]), "codes: q_index must be an integer in [-8, 8) but is 0.5"),
        (lambda taps: value_network(taps, 0, 0, sample=2), "sample must be an integer in [-2, 2) but is 2"),
    ],
)
def test_mistakes_are_one_line(call: Callable, message: str) -> None:
    with refusing(message):
        call(tap(layer(MIX), torch.randn(2, T, DIM, dtype=torch.float64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_output_than_the_sum_of_code_times_value_is_refused_in_every_precision(dtype: torch.dtype) -> None:
    """With rounding of half precision in mind, 1e3 roundings of the largest number refused nothing."""

    def summed(q, k, v, *, keep, **visible):
        return torch.einsum("bhts,bshe->bthe", ph.ops.latent_code(q, k, normalise="softmax", **visible), v)

    def largest(q, k, v, *, keep, **visible):
        code = ph.ops.latent_code(q, k, normalise="softmax", **visible)
        return torch.einsum("bhts,bshe->bthse", code, v).amax(3)

    attention, x = layer([ph.Softmax(3)]).to(dtype), torch.randn(2, T, DIM).to(dtype)
    code = functools.partial(ph.ops.latent_code, normalise="softmax")
    attention.groups[0].use(summed, code=code)
    assert len(value_network(tap(attention, x), 0, 0)) == 1
    attention.groups[0].use(largest, code=code)
    with refusing("must be the sum of code times value but is not"):
        value_network(tap(attention, x), 0, 0)
