"""Check of native code against the reference: small calls of each op, forward and backward."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import REFERENCES, learned

Run = Callable[[AttentionCall], Tensor]
Function = Callable[..., Tensor]
"""A function of tensors."""

Case = tuple[Function, Function, list[Tensor]]
"""Native code and the reference as functions of the same float64 tensors."""

CHECKS: dict[str, list[tuple[str, Callable[[], list[Case]]]]] = {}
"""Name of a source -> for each op of it: name, and a function that makes its cases."""


def check(name: str, op: str, run: Run, calls: Callable[[], list[AttentionCall]]) -> None:
    """Add an op to CHECKS, with a function that makes small float64 calls."""

    def case(x: AttentionCall) -> Case:
        tensors = learned(x)

        def of(impl: Run) -> Function:
            return lambda *own: impl(x.of(dict(zip(tensors, own, strict=True))))

        return of(run), of(REFERENCES[op]), [*tensors.values()]

    CHECKS.setdefault(name, []).append((op, lambda: [case(x) for x in calls()]))


def check_function(name: str, run: Function, reference: Function, examples: Callable[[], list[list[Tensor]]]) -> None:
    """Add a function of tensors to CHECKS."""
    CHECKS.setdefault(name, []).append((name, lambda: [(run, reference, x) for x in examples()]))


WRONG, RIGHT = 3e-5, "right"
"""The relative error from which a library is wrong, and the verdict that is stored for a correct one."""


def worst_error(name: str, dtype: torch.dtype) -> float:
    """The largest relative error (in norm) of outputs and gradients over the cases of CHECKS."""
    worst = 0.0
    for native, reference, tensors in [case for _, cases in CHECKS[name] for case in cases()]:
        came = []
        for impl, kind in ((native, dtype), (reference, torch.float64)):
            leaves = [a.to(dtype).to(kind).requires_grad_() for a in tensors]
            out = impl(*leaves)
            cotangent = torch.linspace(-1, 1, out.numel(), dtype=kind).view_as(out)
            came.append([out, *torch.autograd.grad(out, leaves, cotangent)])
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(*came, strict=True)]
        worst = max(worst, *(math.inf if math.isnan(error) else error for error in errors))
    return worst
