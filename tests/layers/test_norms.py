"""The layers around `ops.norms`: their gains, names and the meta device; numbers of all layers."""

import functools

import pytest
import torch
from problems import draw
from refusals import refused

import polyhead as ph
from polyhead.layers.norms import LayerNorm, RMSNorm


@pytest.mark.parametrize(("kind", "bias"), [(RMSNorm, False), (LayerNorm, True), (LayerNorm, False)])
def test_norms_use_their_gain_shift_and_eps(kind, bias):
    norm = kind(6, eps=0.1, dtype=torch.float64, **({"bias": bias} if kind is LayerNorm else {}))
    assert list(norm.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    x = draw(2, 3, 6)
    y = x if kind is RMSNorm else x - x.mean(-1, keepdim=True)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    expected = y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected + (norm.bias if bias else 0), atol=1e-13, rtol=0)
    assert kind(4).eps == 1e-5


BLOCK = functools.partial(ph.TransformerBlock, ph.MultiHeadAttention(8, ph.Softmax(2)), ph.MlpLayer(8))


def test_mistakes_are_one_line():
    for number, condition in ((float("nan"), "a finite number"), (-1.0, "at least 0")):
        refused(lambda number=number: RMSNorm(4, eps=number), f"^RMSNorm: eps must be {condition} but is {number}$")
        refused(lambda number=number: LayerNorm(4, eps=number), f"^LayerNorm: eps must be {condition} but is {number}$")
    refused(lambda: RMSNorm(6)(torch.zeros(2, 5)), "^rms_norm: d = 5 in x but 6 in weight")
    for window in (True, 0):
        call = functools.partial(ph.MultiHeadAttention, 8, ph.Softmax(2), window=window)
        refused(call, rf"^MultiHeadAttention: window must be an integer of at least 1 but is {window}$")
    call = functools.partial(ph.MultiHeadAttention, 8, ph.Softmax(2), causal="no")  # it was causal
    refused(call, r"^MultiHeadAttention: causal must be True or False but is 'no'$")
    refused(lambda: BLOCK(dropout="a"), r"^TransformerBlock: dropout must be in \[0, 1\) but is a$")
