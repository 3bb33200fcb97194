"""The drop-in where PyTorch's module has more than first derivatives, and where sequences are nested."""

import pytest
import torch
from refusals import refusing
from torch import nn

import polyhead as ph
from polyhead.compat.torch_mha import drop_in

F64 = torch.float64
HEADS = {
    "softmax": None,
    "hyla": ph.Hyla(4, normalise="softmax", act="silu"),
    "linear": ph.Linear(4),
    "relational": ph.Relational(4),
}


def test_second_derivatives_equal_those_of_pytorch():
    theirs = nn.MultiheadAttention(12, 4, batch_first=True, dtype=F64)
    second = []
    for module in (theirs, drop_in(theirs)):
        x = torch.randn(2, 4, 12, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y, weights = module(x, x, x)
        (slope,) = torch.autograd.grad(y.sin().sum() + weights.sin().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", HEADS)
def test_second_derivatives_are_exact_for_any_heads(heads):
    module = drop_in(nn.MultiheadAttention(8, 4, batch_first=True, dtype=F64), HEADS[heads])
    x = torch.randn(1, 3, 8, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: module(x, x, x)[0], x)


def test_nested_sequences_are_refused_in_one_line():
    module = drop_in(nn.MultiheadAttention(12, 4, batch_first=True))
    x = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(5, 12)], layout=torch.jagged)
    with refusing("MultiheadAttention: padded tensors are wanted, but a nested one came"):
        module(x, x, x)
