"""Relational attention on a CPU by native code; native/attention.cpp has the equations, native/attention.py the passes.

Autograd differentiates the map from relations to a head's output.  Altabaa and Lafferty 2024.
"""

from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.kernel import Outputs, unsupported_by_kernels
from polyhead.ops.native import library
from polyhead.ops.native.check import seeded_randn
from polyhead.ops.native.structs import FEW_QUERIES

MIN_PAIRS = 1 << 16
"""Pairs b t s from which on native code is no slower than the reference, tiles and PyTorch's kernels."""

MIN_PAIRS_FEW_QUERIES, MIN_SAMPLES = 1 << 10, 8
"""The same for fewer than FEW_QUERIES queries, in a batch of at least MIN_SAMPLES."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why native code does not take a call, or None.  The first call that it could take starts the compilation."""
    if call.act == "softmax":
        return "takes no relation_act='softmax'"
    return unsupported_by_kernels(call) or library.unsupported_tensor("attention", call.q)


def is_preferred(call: AttentionCall) -> bool:
    """Whether native code was measured to be no slower than the reference, tiles and PyTorch's kernels."""
    if call.q.device.type != "cpu":
        return False
    b, (t, s) = call.q.shape[0], call.lengths
    if t >= FEW_QUERIES:
        return b * t * s >= MIN_PAIRS
    return b >= MIN_SAMPLES and b * t * s >= MIN_PAIRS_FEW_QUERIES


def combine(call: AttentionCall, outputs: Outputs) -> Tensor:
    """The output (b t h e) from the sums over symbols and over relations."""
    retrieved, related = outputs[0].to(call.q.dtype), outputs[1].to(call.q.dtype)
    # W acts on sums over keys, not on pairs, so PyTorch multiplies by it afterwards.
    return retrieved + torch.einsum("h e r, b t h r -> b t h e", call.relation_map, related)


def examples() -> list[AttentionCall]:
    """Calls for the check of native code: partial tiles, symbols by key and by offset, all kinds of masks."""
    randn = seeded_randn()
    # 18 queries, 33 keys, 6 heads in 3 groups, 5 relations.
    q, k, weight = randn(2, 18, 6, 3), randn(2, 33, 3, 3), randn(6, 7, 5)
    q_rel, k_rel = randn(2, 18, 5, 2), randn(2, 33, 5, 2)
    bias = randn(1, 6, 18, 33).masked_fill(randn(1, 6, 18, 33) > 1, -torch.inf)
    mask = randn(2, 6, 18, 33) < 1
    keep = (randn(1, 1, 18, 33) < 1).double() / 0.8
    by_key = AttentionCall(
        q, k, randn(2, 33, 3, 7), bias, Masks(window=9), act="gelu", q_rel=q_rel, k_rel=k_rel, relation_weight=weight
    )
    by_offset = replace(by_key, q=9 * q, v=randn(50, 3, 7), bias=None, masks=Masks(mask), keep=keep, act="tanh")

    # One tensor in two places: its gradient is a sum.
    x, x_rel = randn(1, 37, 6, 5), randn(1, 37, 5, 6)
    v, bias_by_offset = randn(1, 37, 6, 7), randn(6, 73)
    symmetric = AttentionCall(
        x, x, v, bias_by_offset, Masks(causal=True), act="relu", q_rel=x_rel, k_rel=x_rel, relation_weight=weight
    )
    return [by_key, by_offset, symmetric]
