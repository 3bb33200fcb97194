"""Relational attention on a CPU by native code; ops/native/attention.cpp has the equations.

Autograd differentiates the map from relations to a head's output.  Altabaa and Lafferty 2024.
"""

import functools
from dataclasses import replace

import torch
from einops import einsum
from torch import Tensor

import polyhead.ops.native.attention as passes
import polyhead.ops.native.library as native
import polyhead.ops.native.structs as structs
from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Kernel, backward_only, custom_op
from polyhead.ops.latent_code import retrieved_and_related
from polyhead.ops.native.check import check


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why native code does not take a call, or None.  The first call that it could take starts the compilation."""
    if x.act == "softmax":
        return "takes no relation_act='softmax'"
    return backward_only(x) or native.unready("attention", x.q)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference, tiles and PyTorch's kernels?

    Forward and backward, 8 heads, 8 relations as wide as keys, one core with AVX2, CPU time of native code over that of
    the reference: 0.9 to 1.4 at 2^12 pairs b t s, at 2^17 0.8 to 0.9 (t = 32, d = 16) and 0.5 to 0.6 (t = 128, d = 32),
    0.4 to 0.7 at 2^18 (d = 64).  Over that of PyTorch's kernels, relations of width 1: 0.6 causal and 1.0 full (t = 512
    and 1024).  SIMD lanes hold 16 queries, or 16 keys for calls of fewer than 8 queries.  Forward of one query: 0.8 to
    0.9 at 2^10 pairs, 0.4 from 2^11 pairs of at least 8 samples on; of 4 to 7 queries of one sample 1.2 to 1.3.
    """
    b, (t, s) = x.q.shape[0], x.lengths
    few = t < structs.FEW and (t == 1 or b >= 8)
    return x.q.device.type == "cpu" and b * t * s >= (1 << 10 if few else 1 << 16) and (few or t >= structs.FEW)


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """Relational attention by native code, with gradients of everything but masks.

    If `twice`, the reference computes second derivatives; otherwise they raise RuntimeError.
    """
    retrieved, related, _ = (a.to(x.q.dtype) for a in _op(x, twice))
    return retrieved + einsum(x.relation_map, related, "h e r, b t h r -> b t h e")


_op = custom_op(
    Kernel(
        "relational", "native", passes.forward, passes.backward, passes.like, retrieved_and_related,
        saves_outputs=True, device_types="cpu",
    )
)  # fmt: skip


def examples() -> list[AttentionCall]:
    """Calls for the check of native code: partial tiles, symbols by key and by offset, all kinds of limits."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few, keys, weight = draw(2, 18, 6, 3), draw(2, 33, 3, 3), draw(6, 7, 5)
    hidden = draw(1, 6, 18, 33).masked_fill(draw(1, 6, 18, 33) > 1, -torch.inf)
    mask, keep = draw(2, 6, 18, 33) < 1, (draw(1, 1, 18, 33) < 1).double() / 0.8
    one = AttentionCall(few, keys, draw(2, 33, 3, 7), hidden, window=9, relation_weight=weight, act="gelu")
    two = AttentionCall(9 * few, keys, draw(50, 3, 7), None, mask, keep, relation_weight=weight, act="tanh")
    q, q_rel = draw(1, 37, 6, 5), draw(1, 37, 5, 6)
    last = AttentionCall(q, q, draw(1, 37, 6, 7), draw(6, 73), causal=True, relation_weight=weight, act="relu")
    q_rel_few, k_rel = draw(2, 18, 5, 2), draw(2, 33, 5, 2)
    calls = [*(replace(x, q_rel=q_rel_few, k_rel=k_rel) for x in (one, two)), replace(last, q_rel=q_rel, k_rel=q_rel)]
    v, mask, keep = draw(37, 3, 7), mask[:, :, :5], keep[:, :, :5]
    return [*calls, replace(calls[1], q=few[:, :5], v=v, q_rel=q_rel_few[:, :5], mask=mask, keep=keep)]


check("attention", "relational", forward, examples)
