"""Check of native code against the reference: small calls of each op, forward and backward."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall

Attention = Callable[[AttentionCall], Tensor]
Function = Callable[..., Tensor]
"""A function of tensors."""

TOLERANCE = 3e-5
"""The relative error from which on a library is wrong."""


@dataclass(frozen=True)
class CheckCase:
    """Native code and its reference as functions of the same float64 tensors."""

    native: Function
    reference: Function
    tensors: list[Tensor]


CHECKS: dict[str, list[tuple[str, Callable[[], list[CheckCase]]]]] = {}
"""Name of a C++ source -> for each op that it computes: name, and a function that makes its cases."""


def register_op_check(
    source: str, op: str, native: Attention, reference: Attention, examples: Callable[[], list[AttentionCall]]
) -> None:
    """Add an op of attention to CHECKS; `examples` makes small float64 calls."""

    def cases() -> list[CheckCase]:
        return [_case_of_call(call, native, reference) for call in examples()]

    CHECKS.setdefault(source, []).append((op, cases))


def _case_of_call(call: AttentionCall, native: Attention, reference: Attention) -> CheckCase:
    names = list(call.learned_tensors())

    def as_function_of_tensors(attention: Attention) -> Function:
        return lambda *tensors: attention(call.with_tensors(dict(zip(names, tensors, strict=True))))

    tensors = list(call.learned_tensors().values())
    return CheckCase(as_function_of_tensors(native), as_function_of_tensors(reference), tensors)


def worst_error(source: str, dtype: torch.dtype) -> float:
    """The largest relative error (in norm) of outputs and gradients over the cases of a source."""
    worst = 0.0
    for _, make_cases in CHECKS[source]:
        for case in make_cases():
            native = _output_and_gradients(case.native, case.tensors, dtype, dtype)
            exact = _output_and_gradients(case.reference, case.tensors, dtype, torch.float64)
            for result, expected in zip(native, exact, strict=True):
                error = ((result - expected).norm() / expected.norm()).item()
                worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def _output_and_gradients(
    function: Function, tensors: list[Tensor], rounded_to: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    """The output and all gradients, computed in `dtype` from tensors that were rounded first."""
    leaves = [tensor.to(rounded_to).to(dtype).requires_grad_() for tensor in tensors]
    out = function(*leaves)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
    return [out, *torch.autograd.grad(out, leaves, cotangent)]
