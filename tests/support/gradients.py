"""Two ways to compute one output."""

import torch
from torch.testing import assert_close


def same_with_gradients(one, other, leaves):
    """Equal outputs, and equal gradients of the `leaves`; a leaf may have none on both sides."""
    assert_close(one, other, atol=1e-9, rtol=1e-9)
    towards, leaves = torch.randn_like(one), list(leaves)
    grads = [torch.autograd.grad((y * towards).sum(), leaves, allow_unused=True) for y in (one, other)]
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, atol=1e-9, rtol=1e-9)
