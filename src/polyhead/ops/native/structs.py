"""A call of native code in the structs of native/pairs.h.

Tensors become pointers and strides, masks become ranges of visible keys, and the work is cut into parts for threads.
Queries or keys are processed in the lanes of SIMD registers; "own" is the side in the lanes, "other" the other side.
"""

import ctypes
import functools
import math
import os
from ctypes import c_int64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.latent_code import of_pairs

LANES = 16
"""Rows (queries or keys) that native code processes at once, one per SIMD lane."""

FEW_QUERIES = 8
"""Fewer queries fill less than half of the lanes."""

FORWARD, BACKWARD, ONE_QUERY = range(3)
"""The pass to compute; the same numbers as in native/pairs.h."""

LARGE_BIAS = 1 << 20
"""A bias with more numbers is not searched for -inf: reading it would take as long as it saves."""


def fields(*groups: tuple[str, Any]) -> list[tuple[str, Any]]:
    """The `_fields_` of a struct from names of one type, then names of the next, as C++ declares them."""
    pairs = []
    for names, kind in groups:
        for name in names.split():
            pairs.append((name, kind))
    return pairs


# The fields below are those of the structs in native/pairs.h, in the same order.
class RowsStruct(ctypes.Structure):
    """A tensor (b n h width): pointer and strides in numbers."""

    _fields_ = fields(("pointer", c_void_p), ("b n h", c_int64))


class PairsStruct(ctypes.Structure):
    """A tensor (b h t s): pointer and strides in numbers."""

    _fields_ = fields(("pointer", c_void_p), ("b h own other", c_int64))


class BiasGradientStruct(ctypes.Structure):
    """The partial gradients of a bias: pointer and strides in numbers."""

    _fields_ = fields(("pointer", c_void_p), ("b h query key sample_part key_part", c_int64))


class MasksStruct(ctypes.Structure):
    """Ranges of visible keys and queries, bias, dropout and mask."""

    _fields_ = fields(
        ("first_key end_key first_query end_query", c_void_p),
        ("bias keep mask", PairsStruct),
        ("owns others bias_hides", c_int64),
    )
    owners: list[Tensor]
    """The tensors whose memory the struct points into: they must live as long as it does."""


# -------------------------------------------------------------------------------------------------------------- tensors
def to_compute_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in that dtype with a contiguous last dimension."""
    x = x.to(dtype)
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return x.contiguous()


def rows_struct(x: Tensor) -> RowsStruct:
    """The struct of a tensor (b n h width) whose width is contiguous."""
    return RowsStruct(x.data_ptr(), *x.stride()[:3])


def pairs_struct(x: Tensor | None, t: int) -> PairsStruct:
    """The struct of a tensor of 4 dimensions that broadcasts to (b h t s), or by offset (h t+s-1)."""
    if x is None:
        return PairsStruct()
    # A bias by offset has one number for all pairs of the same distance: going one query on is going one column back.
    if x.ndim == 2:
        head, step = x.stride()
        query_0 = x.data_ptr() + (t - 1) * step * x.itemsize  # query i and key j are in column j - i + t - 1
        return PairsStruct(query_0, 0, head, -step, step)
    return PairsStruct(x.data_ptr(), *_broadcast_strides(x.shape, x.stride()))


def _broadcast_strides(shape: torch.Size, strides: tuple[int, ...]) -> list[int]:
    """Strides with 0 for dimensions of size 1, which are shared."""
    return [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]


# ---------------------------------------------------------------------------------------------------------------- masks
def ranges_of_both_sides(masks: Masks, t: int, s: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """For each query the first visible key and one past the last; for each key the same of queries.

    None if every pair is visible.
    """
    if not masks.has_ranges(t):
        return None
    if masks.cu_seqlens is not None:
        # Decreasing edges must not lead out of memory.
        masks = replace(masks, cu_seqlens=masks.cu_seqlens.cummax(0).values)
    first_key, end_key = masks.ranges(t, s, torch.device("cpu"))
    keys = torch.arange(s, dtype=torch.int32)
    # Both ranges rise with the query, so the queries that see a key are found by bisection.
    first_query = torch.searchsorted(end_key, keys, right=True).to(torch.int32)
    end_query = torch.searchsorted(first_key, keys, right=True).to(torch.int32)
    return first_key, end_key, first_query, end_query


def masks_struct(call: AttentionCall, dtype: torch.dtype) -> MasksStruct:
    """The struct of a call's masks and biases."""
    t, s = call.lengths
    bias, keep, mask = call.bias, call.keep, call.masks.mask
    if bias is not None:
        bias = bias.to(dtype)
    if keep is not None:
        keep = of_pairs(keep.to(dtype))
    if mask is not None:
        mask = of_pairs(mask)
    # C++ reads null pointers as "all rows are visible".
    ranges = ranges_of_both_sides(call.masks, t, s) or ()
    range_pointers: list[int | None] = [x.data_ptr() for x in ranges] or [None] * 4

    # Native code hides the pairs of a large bias without a search, as if it held -inf.
    bias_hides = bias is not None and (bias.numel() > LARGE_BIAS or bool((bias == -math.inf).any()))

    struct = MasksStruct(
        *range_pointers, pairs_struct(bias, t), pairs_struct(keep, t), pairs_struct(mask, t), t, s, bias_hides
    )
    struct.owners = [x for x in (bias, keep, mask, *ranges) if x is not None]
    return struct


# ------------------------------------------------------------------------------------------------------ work of threads
def thread_count() -> int:
    """The number of PyTorch's threads."""
    return torch.get_num_threads()


@functools.cache
def openmp_entry() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that PyTorch has loaded, or None."""
    bundled_libraries = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for path in bundled_libraries:
        address = _gomp_parallel(str(path), os.RTLD_NOW | os.RTLD_NOLOAD)
        if address is not None:
            return address
    return _gomp_parallel(None, os.RTLD_NOW)  # PyTorch may be linked to the system's OpenMP


def _gomp_parallel(library_path: str | None, mode: int) -> int | None:
    """The address of GOMP_parallel in a library (None: in the process), or None if it has none."""
    try:
        library = ctypes.CDLL(library_path, mode=mode)
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def backward_parts(b: int, s: int, bias: Tensor | None) -> tuple[int, int]:
    """Into how many parts a backward pass cuts the samples and the keys, for the threads.

    Each part of the keys needs its own dq, and each part of either needs its own gradient of a bias by offset; so the
    parts are few.  Samples that share a dense bias are not cut.  A forward pass of one query is cut alike.
    """
    threads = thread_count()
    if threads == 1:
        return 1, 1
    # Two threads must not add to the same gradient.
    bias_is_shared = bias is not None and bias.ndim == 4 and bias.shape[0] == 1
    sample_parts = 1 if bias_is_shared else max(1, min(b, 4 * threads))
    lane_tiles = max(1, math.ceil(s / LANES))
    return sample_parts, min(lane_tiles, math.ceil(2 * threads / sample_parts))


def sum_key_parts(parts: Tensor) -> Tensor:
    """The sum over the parts of the keys.  Not a view: autograd forbids writing to a view that a custom op returns."""
    if len(parts) == 1:
        return parts.squeeze_(0)
    return parts.sum(0)


def bias_gradient(
    bias: Tensor | None, sample_parts: int, key_parts: int, t: int
) -> tuple[Tensor | None, BiasGradientStruct]:
    """Zeros (sample parts, key parts, ...), whose sum will be the gradient of a bias; float64, as in native/pairs.h."""
    if bias is None:
        return None, BiasGradientStruct()
    if bias.ndim == 2:
        gradient = torch.zeros(sample_parts, key_parts, *bias.shape, dtype=torch.float64)
        sample_stride, key_stride, head_stride, _ = gradient.stride()
        query_0 = gradient.data_ptr() + (t - 1) * gradient.itemsize
        return gradient, BiasGradientStruct(query_0, 0, head_stride, -1, 1, sample_stride, key_stride)
    gradient = torch.zeros(1, 1, *bias.shape, dtype=torch.float64)
    strides = _broadcast_strides(bias.shape, gradient.stride()[2:])
    return gradient, BiasGradientStruct(gradient.data_ptr(), *strides)
