"""Softmax attention on a CPU by native code; ops/native/attention.cpp has the equations.

Vaswani et al. 2017, eq. 1.
"""

import functools

import torch
from torch import Tensor

import polyhead.ops.native.attention as passes
import polyhead.ops.native.library as native
import polyhead.ops.native.structs as structs
from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Kernel, backward_only, custom_op
from polyhead.ops.native.check import check


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why native code does not take a call, or None.  The first call that it could take starts the compilation."""
    return backward_only(x) or native.unready("attention", x.q)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than PyTorch's kernels, the reference and tiles?

    Forward and backward, 8 heads, float32, one core with AVX2, CPU time of native code over that of what "auto"
    takes without it.  d = 8: 0.9 at 2^15 pairs b t s, 0.8 at 2^16, 0.2 to 0.7 from 2^17 on.  d = 16: 0.8 to 1.1.
    d = 64: 1.0 to 1.4.  Causal, t = 128 and more: 0.5 to 0.7 (d = 16), 0.5 to 0.9 (d = 64); shorter: 0.9 to 1.2.  With
    a learned bias by offset: 0.3 to 0.7 (d = 16), 0.4 to 0.7 (d = 64); with a fixed one: 0.8 to 0.9, 0.8 to 1.0.
    """
    (t, s), width = x.lengths, max(x.q.shape[-1], x.v.shape[-1])
    small = width <= 8 or (width <= 64 and (x.bias is not None or (x.causal and t >= 128)))
    exact = native.NUMBERS.get(x.q.dtype) == x.q.dtype  # half precision was not timed
    return x.q.device.type == "cpu" and exact and small and t >= structs.FEW and x.q.shape[0] * t * s >= 1 << 16


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """Softmax attention by native code, with gradients of q, k, v and bias.

    If `twice`, the reference computes second derivatives; otherwise they raise RuntimeError."""
    return _op(x, twice)[0].to(x.q.dtype)


_op = custom_op(
    Kernel("softmax", "native", passes.forward, passes.backward, passes.like, saves_outputs=True, device_types="cpu")
)


def examples() -> list[AttentionCall]:
    """Calls for the check of native code; those of relational attention run the same code with all kinds of limits."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = draw(2, 37, 4, 3), draw(2, 41, 2, 3), draw(2, 41, 2, 7)
    edges = torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    return [
        AttentionCall(q, k, v, draw(4, 77), causal=True),
        AttentionCall(q[:1], q[:1], q[:1], cu_seqlens=edges),
        AttentionCall(q[:, :5], k, v, window=9),
    ]


check("attention", "softmax", forward, examples)
