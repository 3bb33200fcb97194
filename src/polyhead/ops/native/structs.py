"""A call of native code in the structs of native/pairs.h: tensors as pointers and strides, what a query sees, and how
threads share the work."""

import ctypes
import math

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import of_pairs
from polyhead.ops.native.threads import threads
from polyhead.ops.tiles import reach

LANES = 16
"""Rows (queries or keys) that native code processes at once, one per SIMD lane."""

FORWARD, BACKWARD, FEW_QUERIES = range(3)
"""The pass to compute; the same numbers as in native/pairs.h."""

FEW = 8
"""Calls with fewer queries hold keys in the SIMD lanes."""


class RowsStruct(ctypes.Structure):
    """A tensor (b n h width): pointer and strides in numbers; see native/pairs.h."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("b", "n", "h"))]


class PairsStruct(ctypes.Structure):
    """A tensor (b h t s): pointer and strides in numbers."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("b", "h", "own", "other"))]


class BiasGradStruct(ctypes.Structure):
    """The gradient of a bias: pointer and strides in numbers; see native/pairs.h."""

    _fields_ = [
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("b", "h", "query", "key", "slot", "strip")),
    ]


class LimitsStruct(ctypes.Structure):
    """Ranges of visible keys and queries, bias, dropout and mask; "own" is the side in the lanes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("first", "end", "low", "high")),
        *((name, PairsStruct) for name in ("bias", "keep", "mask")),
        *((name, ctypes.c_int64) for name in ("owns", "others", "hides")),
    ]


def rows(x: Tensor | None) -> RowsStruct:
    """The struct of a tensor (b n h width) whose width is contiguous."""
    return RowsStruct() if x is None else RowsStruct(x.data_ptr(), *x.stride()[:3])


def pairs(x: Tensor | None, t: int) -> PairsStruct:
    """The struct of a tensor of 4 dimensions that broadcasts to (b h t s), or by offset (h t+s-1)."""
    if x is None:
        return PairsStruct()
    if x.ndim == 2:
        head, step = x.stride()
        return PairsStruct(x.data_ptr() + (t - 1) * step * x.itemsize, 0, head, -step, step)
    return PairsStruct(x.data_ptr(), *(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)))


def sight(
    t: int, s: int, causal: bool, window: int | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """For each query the first visible key and one past the last; for each key the same of queries.

    None if every pair is visible.
    """
    if not (causal and t > 1) and window is None and cu_seqlens is None:
        return None  # a single causal query sees all keys
    edges = None if cu_seqlens is None else cu_seqlens.cummax(0).values  # wrong ones must not lead out of memory
    first, end = reach(t, s, torch.device("cpu"), causal=causal, window=window, cu_seqlens=edges)
    keys = torch.arange(s, dtype=torch.int32)
    low, high = torch.searchsorted(end, keys, right=True), torch.searchsorted(first, keys, right=True)
    return first, end, low.to(torch.int32), high.to(torch.int32)


def limits(x: AttentionCall, dtype: torch.dtype) -> tuple[LimitsStruct, list[Tensor | None]]:
    """The struct of a call's masks and biases, and the tensors that own its memory."""
    t, s = x.lengths
    bias, keep = (None if a is None else a.to(dtype) for a in (x.bias, x.keep))
    mask, keep = (a if a is None else of_pairs(a) for a in (x.mask, keep))
    look = sight(t, s, x.causal, x.window, x.cu_seqlens)
    ends = [None] * 4 if look is None else [a.data_ptr() for a in look]
    # Reading a large bias takes as long as it saves; reading an expanded one takes much longer.
    hides = bias is not None and (bias.numel() > 1 << 20 or bool((bias == -math.inf).any()))
    return LimitsStruct(*ends, pairs(bias, t), pairs(keep, t), pairs(mask, t), t, s, hides), [
        bias,
        keep,
        mask,
        *(look or ()),
    ]


def shares(b: int, s: int, bias: Tensor | None) -> tuple[int, int]:
    """Into how many parts a backward pass cuts the samples and the keys, for the threads.

    Each part of the keys needs its own dq, and each part of either needs its own gradient of a bias by offset; so the
    parts are few.  Samples that share a dense bias are not cut.
    """
    n, tiles = threads(), max(1, -(-s // LANES))
    if n == 1:
        return 1, 1
    shared = bias is not None and bias.ndim == 4 and bias.shape[0] == 1
    slots = 1 if shared else max(1, min(b, 4 * n))
    return slots, min(tiles, -(-2 * n // slots))


def forward_shares(x: AttentionCall) -> tuple[int, int, int]:
    """The same for a forward pass, and the pass: FEW_QUERIES, or FORWARD, which divides its queries itself."""
    t, s = x.lengths
    return (*shares(len(x.q), s, None), FEW_QUERIES) if t < FEW else (1, 1, FORWARD)


def added(parts: Tensor) -> Tensor:
    """The sum over the parts of the keys.  Not a view: autograd forbids writing to a view that a custom op returns."""
    return parts.sum(0) if len(parts) > 1 else parts.squeeze_(0)


def bias_grad(bias: Tensor | None, slots: int, strips: int, t: int) -> tuple[Tensor | None, BiasGradStruct]:
    """Zeros (slots strips ...), whose sum will be the gradient of a bias; float64, as in native/pairs.h."""
    if bias is None:
        return None, BiasGradStruct()
    if bias.ndim == 2:
        grad = torch.zeros(slots, strips, *bias.shape, dtype=torch.float64)
        slot, strip, head, _ = grad.stride()
        return grad, BiasGradStruct(grad.data_ptr() + (t - 1) * grad.itemsize, 0, head, -1, 1, slot, strip)
    grad = torch.zeros(1, 1, *bias.shape, dtype=torch.float64)
    steps = (0 if n == 1 else step for n, step in zip(bias.shape, grad.stride()[2:], strict=True))
    return grad, BiasGradStruct(grad.data_ptr(), *steps)


def numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in that dtype with a contiguous last dimension."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
