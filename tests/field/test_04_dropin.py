"""`nn.MultiheadAttention` after `replace`: for FX still one node, and it has second derivatives."""

import copy
import pickle

import pytest
import torch
from refusals import refusing
from torch import fx, nn
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat.torch_mha import drop_in, replace

F64 = torch.float64
MIXED = [ph.Softmax(2), ph.Hyla(2)]


class Vision(nn.Module):
    """What a vision transformer does with nn.MultiheadAttention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        return (x + y).mean(1)


def test_symbolic_trace_has_one_node_for_our_attention_as_for_pytorchs():
    model, x = Vision().eval(), torch.randn(2, 5, 12)
    nodes = [(node.op, node.target) for node in fx.symbolic_trace(model).graph.nodes]
    expected = model(x)
    replace(model)
    traced = fx.symbolic_trace(model)
    assert [(node.op, node.target) for node in traced.graph.nodes] == nodes
    assert_close(traced(x), expected, rtol=1e-5, atol=1e-6)


def test_a_replaced_model_is_still_copied_and_pickled():
    model, x = Vision().eval(), torch.randn(2, 5, 12)
    replace(model, MIXED)
    attention = pickle.loads(pickle.dumps(copy.deepcopy(model.attention)))
    assert type(attention) is type(model.attention)
    assert torch.equal(attention(x, x, x)[0], model.attention(x, x, x)[0])


def test_our_own_layer_and_ops_are_refused_in_one_line():
    with refusing("MultiHeadAttention: x must be a Tensor (b t m) but is a Proxy"):
        fx.symbolic_trace(nn.Sequential(ph.MultiHeadAttention(12, MIXED)))
    with refusing("hyla: q must be a Tensor (b t h d) but is a Proxy"):
        fx.symbolic_trace(lambda q: ph.ops.hyla(q, q, q))


def test_second_derivatives_equal_those_of_pytorch():
    reference = nn.MultiheadAttention(12, 4, batch_first=True, dtype=F64)
    second_derivatives = []
    for module in (reference, drop_in(reference)):
        x = torch.randn(2, 4, 12, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y, weights = module(x, x, x)
        (gradient,) = torch.autograd.grad(y.sin().sum() + weights.sin().sum(), x, create_graph=True)
        second_derivatives.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    assert_close(*second_derivatives, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [ph.Hyla(4, normalise="softmax", act="silu"), ph.Linear(4), ph.Relational(4)])
def test_second_derivatives_are_exact_for_other_heads(heads):
    module = drop_in(nn.MultiheadAttention(8, 4, batch_first=True, dtype=F64), heads)
    x = torch.randn(1, 3, 8, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: module(x, x, x)[0], x)
