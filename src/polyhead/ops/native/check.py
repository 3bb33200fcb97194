"""Whether native code computes what the reference does: small calls of each op, forward and backward."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import REFERENCES, packed, unpacked

CHECKS: dict[str, tuple[Callable[[AttentionCall], Tensor], Callable[[], list[AttentionCall]]]] = {}
"""Name of a source -> what calls it, and small calls (float64) whose results are compared with the reference."""

WRONG, RIGHT = 3e-5, "right"
"""Errors from here on are no roundings; what is noted of a library without them."""


def worst_error(name: str, dtype: torch.dtype) -> float:
    """Of outputs and gradients of the calls that CHECKS has, the largest error relative to its norm."""
    (native, calls), worst = CHECKS[name], 0.0
    for x in calls():
        (tensors, fixed), came = packed(x), []
        for impl, kind in ((native, dtype), (REFERENCES[name], torch.float64)):
            leaves = [a.to(dtype).to(kind).requires_grad_(a.shape != (0,)) for a in tensors]
            own = unpacked(
                leaves, fixed, causal=x.causal, window=x.window, scale=x.factor, normalise=x.normalise, act=x.act
            )
            out = impl(own)
            cotangent = torch.linspace(-1, 1, out.numel(), dtype=kind).view_as(out)
            came.append([out, *torch.autograd.grad(out, [a for a in leaves if a.requires_grad], cotangent)])
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(*came, strict=True)]
        worst = max(worst, *(math.inf if math.isnan(error) else error for error in errors))
    return worst
