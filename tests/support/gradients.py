"""Two ways to compute one output."""

import torch
from torch.testing import assert_close


def same_with_gradients(actual, expected, leaves):
    """Equal outputs, and equal gradients of the `leaves`; a leaf may have none on both sides."""
    assert_close(actual, expected, atol=1e-9, rtol=1e-9)
    cotangent, leaves = torch.randn_like(actual), list(leaves)
    grads = [torch.autograd.grad((y * cotangent).sum(), leaves, allow_unused=True) for y in (actual, expected)]
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, atol=1e-9, rtol=1e-9)
