"""The states of linear attention: steps are the whole call in pieces."""

import importlib
import itertools

import pytest
import torch
from refusals import refusing
from torch.testing import assert_close

from polyhead import ops


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(importlib.import_module("polyhead.ops.linear.chunked"), "CHUNK", 4)


@pytest.mark.parametrize("cuts", [(0, 23), (0, 1, 2, 9, 23), tuple(range(24)), (0, 0, 8, 8, 23)])
def test_steps_are_the_whole_call_in_pieces(problem, cuts):
    qkv, options = problem(23, 23, causal=True, mask="keys")
    expected = ops.linear_attention(*qkv, **options, act="relu", scale=0.3, impl="reference")
    outs, state = [], None
    for start, end in itertools.pairwise(cuts):
        mask = options["mask"][..., start:end]
        out, state = ops.linear_step(*(x[:, start:end] for x in qkv), state, scale=0.3, mask=mask, act="relu")
        outs.append(out)
    actual, cotangent = torch.cat(outs, 1), torch.randn_like(expected)
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert_close(*(torch.autograd.grad(out, qkv, cotangent) for out in (actual, expected)), rtol=1e-9, atol=1e-9)


def test_steps_refuse_what_does_not_fit():
    q, k, v = torch.zeros(3, 1, 2, 2, 4)
    _, state = ops.linear_step(q, k, v)
    for inputs, message in (
        ((q, k.double(), v), "q, k and v must have one dtype but have torch.float32, torch.float64, torch.float32"),
        ((q, k, v.to("meta")), "q, k and v must have one device but have cpu, cpu, meta"),
        ((q, k, v, state.double()), "the state of torch.float32 tokens must be torch.float32 but is torch.float64"),
        ((q, k, v, state[:, :1]), "g = 2 in k but 1 in state"),
    ):
        with refusing(f"linear_step: {message}"):
            ops.linear_step(*inputs)
    assert ops.linear_step(*(x.half() for x in (q, k, v)), state)[1].dtype == torch.float32
    with refusing("linear_step: mask must be one of keys (b|1, 1, 1, t) but is (2, 2)"):
        ops.linear_step(q, k, v, mask=torch.ones(2, 2, dtype=torch.bool))


def test_the_state_of_half_precision_tokens_is_wider():
    k = torch.full((1, 1, 1, 1), 64.0, dtype=torch.float16)
    out, state = ops.linear_step(k, k, k, torch.full((1, 1, 1, 1), 2.0**17), scale=2.0**-9)
    assert state.item() == 2.0**17 + 64**2
    assert out.dtype == torch.float16
    assert out.item() == 64 * 2.0**-9 * (2.0**17 + 64**2)


@pytest.mark.parametrize("edges", [(0, 14, 23), (0, 3, 3, 9, 20), (0, 1, 2, 23)])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_in_chunks_are_the_reference(problem, edges, causal):
    qkv, options = problem(23, 23, edges=edges, causal=causal)
    outs = [ops.linear_attention(*qkv, **options, impl=impl) for impl in ("chunked", "reference")]
    assert_close(*outs)
    cotangent = torch.randn_like(outs[0])
    assert_close(*(torch.autograd.grad(out, qkv, cotangent) for out in outs))


@pytest.mark.parametrize("causal", [False, True])
def test_a_short_sequence_keeps_its_digits_after_a_long_one(problem, causal):
    """The difference of two sums over the whole sample would be 0 there."""
    (q, k, v), options = problem(23, 23, edges=(0, 14, 23), causal=causal, dtype=torch.float32)
    scale = torch.ones(23)
    scale[:14] = 1e6
    out = ops.linear_attention(q, k * scale[:, None, None], v * scale[:, None, None], **options, impl="chunked")
    expected = ops.linear_attention(*(x[:, 14:] for x in (q, k, v)), causal=causal, impl="reference")
    assert_close(out[:, 14:], expected, rtol=1e-4, atol=1e-5)
