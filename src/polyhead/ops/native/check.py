"""Check of native code against the reference: small calls of each op, forward and backward."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import REFERENCES, packed, unpacked

Run = Callable[[AttentionCall], Tensor]

CHECKS: dict[str, list[tuple[str, Run, Callable[[], list[AttentionCall]]]]] = {}
"""Name of a source -> for each op of it: name, the function that calls it, one that makes small float64 calls."""


def check(name: str, op: str, run: Run, calls: Callable[[], list[AttentionCall]]) -> None:
    """Add an op to CHECKS."""
    CHECKS.setdefault(name, []).append((op, run, calls))


WRONG, RIGHT = 3e-5, "right"
"""The relative error from which a library is wrong, and the verdict that is stored for a correct one."""


def worst_error(name: str, dtype: torch.dtype) -> float:
    """The largest relative error (in norm) of outputs and gradients over the calls of CHECKS."""
    worst = 0.0
    for op, native, x in [(op, native, x) for op, native, calls in CHECKS[name] for x in calls()]:
        (tensors, fixed), came = packed(x), []
        for impl, kind in ((native, dtype), (REFERENCES[op], torch.float64)):
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
