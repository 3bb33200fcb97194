"""Softmax attention on a CPU by native code; native/attention.cpp has the equations, native/attention.py the passes.

Vaswani et al. 2017, eq. 1.
"""

import torch

from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.kernel import unsupported_by_kernels
from polyhead.ops.native import library
from polyhead.ops.native.check import seeded_randn
from polyhead.ops.native.structs import FEW_QUERIES
from polyhead.ops.softmax.reference import unsupported_extras

MIN_PAIRS = 1 << 16
"""Pairs b t s from which on native code is no slower than PyTorch's kernels."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why native code does not take a call, or None.  The first call that it could take starts the compilation."""
    return unsupported_extras(call) or unsupported_by_kernels(call) or library.unsupported_tensor("attention", call.q)


def is_preferred(call: AttentionCall) -> bool:
    """Whether native code was measured to be no slower than PyTorch's kernels, the reference and tiles.

    It is faster for narrow heads, and up to width 64 with a bias or causality.  Half precision was not timed.
    """
    t, s = call.lengths
    if call.q.device.type != "cpu" or library.COMPUTE_DTYPES.get(call.q.dtype) != call.q.dtype:
        return False
    width = max(call.q.shape[-1], call.v.shape[-1])
    is_narrow = width <= 8
    has_limits = call.bias is not None or (call.masks.causal and t >= 128)
    if not is_narrow and not (width <= 64 and has_limits):
        return False
    return t >= FEW_QUERIES and call.q.shape[0] * t * s >= MIN_PAIRS


def examples() -> list[AttentionCall]:
    """Calls for the check of native code; those of relational attention run the same code with all kinds of masks."""
    randn = seeded_randn()
    q, v, cu_seqlens = randn(1, 37, 4, 3), randn(1, 37, 2, 7), torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    return [AttentionCall(q, q[:, :, :2], v, randn(4, 73), masks=Masks(causal=True, cu_seqlens=cu_seqlens))]
