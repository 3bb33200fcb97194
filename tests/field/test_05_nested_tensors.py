"""Nested tensors are refused in one line, which names what to use instead."""

import pytest
import torch
from refusals import refused

import polyhead as ph
from polyhead import ops


def nested(*shape):
    """Two sequences of three and five tokens."""
    return torch.nested.nested_tensor([torch.randn(3, *shape), torch.randn(5, *shape)], layout=torch.jagged)


def test_a_layer_names_cu_seqlens():
    layer, x = ph.MultiHeadAttention(16, ph.Softmax(4)), torch.randn(2, 5, 16)
    text = "is a nested tensor; join its sequences into one row and give cu_seqlens$"
    refused(lambda: layer(nested(16)), f"^MultiHeadAttention: x {text}")
    refused(lambda: layer(x, nested(16)), f"^MultiHeadAttention: context {text}")


@pytest.mark.parametrize("op", [ops.softmax_attention, ops.hyla, ops.linear_attention], ids=lambda op: op.__name__)
def test_an_op_names_cu_seqlens(op):
    q = nested(2, 4)
    refused(lambda: op(q, q, q), f"^{op.__name__}: q is a nested tensor; .*cu_seqlens$")
