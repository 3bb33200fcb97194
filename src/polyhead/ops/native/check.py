"""Check of native code against the reference: small calls of each op, forward and backward."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall

Attention = Callable[[AttentionCall], Tensor]

TOLERANCE = 3e-5
"""The relative error from which on a library is wrong."""


@dataclass(frozen=True)
class OpCheck:
    """An op of a C++ source: its native code, its reference, and a function that makes small float64 calls."""

    op: str
    native: Attention
    reference: Attention
    examples: Callable[[], list[AttentionCall]]


def seeded_randn() -> Callable[..., Tensor]:
    """`torch.randn` of float64 from a generator of its own, whose numbers are the same in every process."""
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


CHECKS: dict[str, list[OpCheck]] = {}
"""Name of a C++ source -> the ops that it computes."""


def register_op_check(source: str, check: OpCheck) -> None:
    """Add an op of attention to CHECKS."""
    CHECKS.setdefault(source, []).append(check)


def worst_error(source: str, dtype: torch.dtype) -> float:
    """The largest relative error (in norm) of outputs and gradients over the calls of a source."""
    worst = 0.0
    for check in CHECKS[source]:
        for call in check.examples():
            native = _output_and_gradients(check.native, call, dtype, dtype)
            exact = _output_and_gradients(check.reference, call, dtype, torch.float64)
            for result, expected in zip(native, exact, strict=True):
                error = ((result - expected).norm() / expected.norm()).item()
                worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def _output_and_gradients(
    attention: Attention, call: AttentionCall, rounded_to: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    """The output and all gradients, computed in `dtype` from tensors that were rounded first."""
    leaves = {}
    for name, tensor in call.learned_tensors().items():
        leaves[name] = tensor.to(rounded_to).to(dtype).requires_grad_()
    out = attention(call.with_tensors(leaves))
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
    # Of a sum: a cotangent that is given to torch.autograd makes it import its compiler.
    return [out, *torch.autograd.grad((out * cotangent).sum(), list(leaves.values()))]
