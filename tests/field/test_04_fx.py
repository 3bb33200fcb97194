"""FX after `replace`: a model whose attention was a leaf before has a leaf in its place."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat.torch_mha import replace


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
    replace(model, [ph.Softmax(2), ph.Hyla(2)])
    attention = pickle.loads(pickle.dumps(copy.deepcopy(model.attention)))
    assert type(attention) is type(model.attention)
    assert torch.equal(attention(x, x, x)[0], model.attention(x, x, x)[0])


def test_our_own_layer_and_ops_are_refused_in_one_line_or_named_as_a_leaf():
    model = nn.Sequential(ph.MultiHeadAttention(12, [ph.Softmax(2), ph.Hyla(2)])).eval()
    with pytest.raises(ValueError, match=r"^MultiHeadAttention: x must be a Tensor \(b t m\) but is a Proxy$"):
        fx.symbolic_trace(model)
    with pytest.raises(ValueError, match=r"^hyla: q must be a Tensor \(b t h d\) but is a Proxy$"):
        fx.symbolic_trace(lambda q: ph.ops.hyla(q, q, q))

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, ph.MultiHeadAttention) or super().is_leaf_module(module, name)

    x = torch.randn(2, 5, 12)
    assert_close(fx.GraphModule(model, Tracer().trace(model))(x), model(x))
