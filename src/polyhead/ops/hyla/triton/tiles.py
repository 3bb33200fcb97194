# mypy: disallow-untyped-defs=False
"""Building blocks of the Triton kernels: tiles of (b n h d) tensors, products, masks.

This file imports triton, so it is imported only where a kernel is about to run.

A kernel takes at most six arguments, by this convention:

    tensors    tuple of pointers; None where a tensor is absent
    strides    tuple of (sample, row, head) strides; the last dimension is contiguous
    t, s       numbers of queries and keys: never specialised, so a new length needs no compilation
    settings   tuple: the scale as a `pair`, `RuntimeMasks`, and all else that varies between calls (the name `options`
               would be a SyntaxError at launch: Triton's launcher has an argument of that name)
    C          frozen dataclass of compile-time constants

Offsets of samples and of first rows have 64 bits; offsets within a tile have 32.
"""

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.call import Masks, sequence_ranges
from polyhead.ops.latent_code import at_least_float32, of_pairs

SMALLEST = 16
"""The fewest rows, columns and terms of the 16-bit tiles that tensor cores multiply."""

FARTHEST = 1 << 30
"""Windows are cut to this size: a larger one masks nothing more, and sums with positions must fit into 32 bits."""

STEEPEST = 1 << 24
"""The largest stride of rows: offsets within a tile have 32 bits.  The last head is at most FARTHEST away."""

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


# -------------------------------------------------------------------------------------------------- what is compiled in
def jit(f: Callable[..., Any]) -> Any:
    """triton.jit for our convention.  It unwraps `f`: a wrapper that checks annotations has no source to compile."""
    f = inspect.unwrap(f)
    return triton.jit(f, do_not_specialize=[name for name in ("t", "s") if name in inspect.signature(f).parameters])


class CompiledIn:
    """Base of compile-time constants that kernels pass on to functions: triton 3.6 reads the type of each argument."""

    @property
    def type(self) -> tl.constexpr_type:
        return tl.constexpr_type(self)

    def _flatten_ir(self, handles: list[object]) -> None:
        """Adds nothing: it holds no run-time values."""


@dataclass(frozen=True)
class Block(CompiledIn):
    """Sizes of one tile of a tensor (b n h d): the true sizes, and their paddings to powers of two.

    Attributes:
        share: How many heads of a kernel read the same head of the tensor.
        spread: Rows of each head in a tile [row, head, width]; all but the first are zeros.
        first: The first column of such a tile.
    """

    rows: int
    heads: int
    width: int
    heads_padded: int
    width_padded: int
    share: int = 1
    spread: int = 1
    first: int = 0


@dataclass(frozen=True)
class Dots(CompiledIn):
    """How matrices are multiplied: `total` is the dtype of sums, at least float32; `upcast` is for the interpreter."""

    total: tl.dtype
    precision: str
    upcast: bool


@dataclass(frozen=True)
class Sight(CompiledIn):
    """Sizes of tiles of pairs, and the part of the masks that is compiled in."""

    queries: int
    keys: int
    causal: bool


class RuntimeMasks(NamedTuple):
    """The part of the masks that is not compiled in; None where a field limits nothing."""

    mask: Tensor | None  # (b|1 s), True at visible keys
    mask_stride: int | None  # stride of its samples
    first: Tensor | None  # (t,) first row of each row's own sequence
    end: Tensor | None  # (t,) one after its last row
    window: int | None


def padded(n: int) -> int:
    """The smallest power of two that is at least n and at least SMALLEST."""
    return max(SMALLEST, triton.next_power_of_2(n))


def block(x: Tensor, rows: int, heads: int) -> Block:
    """The tile of `rows` rows of (b n g d) that a kernel with `heads` heads reads or writes."""
    return Block(rows, heads, x.shape[-1], padded(heads), padded(x.shape[-1]), heads // x.shape[2])


def dots(dtype: torch.dtype, tf32: bool) -> Dots:
    """How products of that dtype are computed; float32 uses tf32 where PyTorch's own products may."""
    # The interpreter multiplies the bit patterns of bfloat16.
    upcast = triton.knobs.runtime.interpret and dtype.itemsize == 2
    precision = "tf32" if tf32 and dtype == torch.float32 else "ieee"
    return Dots(TYPES[at_least_float32(dtype)], precision, upcast)


def pair(x: float) -> tuple[float, float]:
    """Two float32 numbers whose sum is x: a kernel takes no float64 argument."""
    high = ctypes.c_float(x).value  # not a tensor: on the default device, reading it could synchronise
    return high, x - high


def limits(masks: Masks, t: int, s: int) -> RuntimeMasks:
    """The `RuntimeMasks` of masks of keys."""
    first, end, window, cu_seqlens = None, None, masks.window, masks.cu_seqlens
    if window is not None:
        window = min(window, FARTHEST)
    if cu_seqlens is not None:
        first, end = sequence_ranges(cu_seqlens, t)
    if masks.mask is None:
        return RuntimeMasks(None, None, first, end, window)
    mask = of_pairs(masks.mask)[:, 0, 0].expand(-1, s)
    mask = rowwise(mask).view(torch.uint8)  # rowwise, because it may be a view of a wider mask
    return RuntimeMasks(mask, mask.stride(0) * (mask.shape[0] > 1), first, end, window)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of samples, rows and heads."""
    return x.stride(0), x.stride(1), x.stride(2)


def rowwise(x: Tensor) -> Tensor:
    """`x` if its last dimension is contiguous and the strides of rows and heads are not too large; otherwise a copy."""
    fits = x.stride(-1) == 1
    if x.ndim > 2:
        fits = fits and x.stride(-3) <= STEEPEST and (x.shape[-2] - 1) * x.stride(-2) <= FARTHEST
    if fits:
        return x
    return x.contiguous()


# ------------------------------------------------------------------------------------------------------- inside kernels
@jit
def load_by_head(start, row, end, strides, B: tl.constexpr):
    """[head, row, width] of the rows from `row` on, zeros from `end` on; `start` points to the sample."""
    h = tl.arange(0, B.heads_padded)[:, None, None]
    i = tl.arange(0, B.rows)[None, :, None]
    c = tl.arange(0, B.width_padded)[None, None, :]
    at = start + tl.cast(row, tl.int64) * strides[1] + ((h // B.share) * strides[2] + i * strides[1] + c)
    return tl.load(at, mask=(h < B.heads) & (row + i < end) & (c < B.width), other=0.0)


@jit
def load_by_row(start, row, end, strides, B: tl.constexpr):
    """The same as [row, head, width]."""
    i = tl.arange(0, B.rows)[:, None, None]
    slot = tl.arange(0, B.heads_padded)[None, :, None]  # a head has `spread` slots, and its numbers are in the first
    c = tl.arange(0, B.width_padded)[None, None, :]
    h = slot // B.spread
    at = start + B.first + tl.cast(row, tl.int64) * strides[1] + ((h // B.share) * strides[2] + i * strides[1] + c)
    is_read = (h < B.heads) & (slot % B.spread == 0)
    return tl.load(at, mask=is_read & (row + i < end) & (c < B.width - B.first), other=0.0)


@jit
def store_by_head(start, row, end, strides, x, B: tl.constexpr):
    """The inverse of `load_by_head`; each head of the kernel must have its own head of the tensor."""
    h = tl.arange(0, B.heads_padded)[:, None, None]
    i = tl.arange(0, B.rows)[None, :, None]
    c = tl.arange(0, B.width_padded)[None, None, :]
    at = start + tl.cast(row, tl.int64) * strides[1] + (h * strides[2] + i * strides[1] + c)
    tl.store(at, x.to(start.dtype.element_ty), mask=(h < B.heads) & (row + i < end) & (c < B.width))


@jit
def store_by_row(start, row, end, strides, x, B: tl.constexpr):
    """The inverse of `load_by_row`."""
    i = tl.arange(0, B.rows)[:, None, None]
    h = tl.arange(0, B.heads_padded)[None, :, None]
    c = tl.arange(0, B.width_padded)[None, None, :]
    at = start + B.first + tl.cast(row, tl.int64) * strides[1] + (h * strides[2] + i * strides[1] + c)
    tl.store(at, x.to(start.dtype.element_ty), mask=(h < B.heads) & (row + i < end) & (c < B.width - B.first))


@jit
def dot(x, y, D: tl.constexpr):
    """x @ y for stacks of matrices, summed in D.total."""
    if D.upcast:
        x = x.to(D.total)
        y = y.to(D.total)
    return tl.dot(x, y, input_precision=D.precision, out_dtype=D.total)


@jit
def positive(x):
    """relu(x); NaN stays NaN, which `tl.maximum` would make 0 on a card."""
    return tl.where(x <= 0, tl.zeros_like(x), x)


@jit
def number(pair, dtype: tl.constexpr):
    """The number that `pair` split."""
    return tl.cast(pair[0], dtype) + tl.cast(pair[1], dtype)


@jit
def by_offset(start, q0, k0, lengths, S: tl.constexpr, B: tl.constexpr):
    """[head, query, key] of a bias by offset (h t+s-1): column key - query + t - 1; B gives the heads."""
    t, s = lengths
    h = tl.arange(0, B.heads_padded)[:, None, None]
    i = tl.arange(0, S.queries)[None, :, None]
    j = tl.arange(0, S.keys)[None, None, :]
    at = start + (k0 - q0 + t - 1) + h * (t + s - 1) + (j - i)
    return tl.load(at, mask=(h < B.heads) & (q0 + i < t) & (k0 + j < s), other=0.0)


@jit
def visible(b, q0, k0, lengths, limits, S: tl.constexpr):
    """[query, key], True where the query may attend to the key; False outside the lengths."""
    t, s = lengths
    mask, mask_stride, first, end, window = limits
    i = q0 + tl.arange(0, S.queries)
    j = k0 + tl.arange(0, S.keys)
    high = tl.where(i < t, s, 0)
    if S.causal:
        high = tl.minimum(high, i + (s - t + 1))
    if window is not None:
        high = tl.minimum(high, i + (s - t + window))
    if first is not None:
        high = tl.minimum(high, tl.load(end + i, mask=i < t, other=0))
    is_visible = j[None, :] < high[:, None]
    low = i + (s - t)
    if window is not None:
        low -= window - 1
    if first is not None:
        lowest = tl.load(first + i, mask=i < t, other=0)
        low = lowest if window is None else tl.maximum(low, lowest)
    if window is not None or first is not None:
        is_visible = is_visible & (j[None, :] >= low[:, None])
    if mask is not None:
        is_visible = is_visible & (tl.load(mask + b * mask_stride + j, mask=j < s, other=0) != 0)[None, :]
    return is_visible


@jit
def keys_of(q0, lengths, limits, S: tl.constexpr):
    """(first, end) of the keys that any query of a tile may attend to by causality, window and packing.

    `first` is a multiple of the tile's keys, so that programs which divide the keys cut them at the same positions.
    """
    t, s = lengths
    _look, _sample, first, end, window = limits
    last = tl.minimum(q0 + S.queries, t) - 1
    low = q0 * 0
    high = low + s
    if S.causal:
        high = tl.minimum(high, last + 1 + s - t)
    if window is not None:
        low = tl.maximum(low, q0 + (s - t) - window + 1)
        high = tl.minimum(high, last + (s - t) + window)
    if first is not None:
        low = tl.maximum(low, tl.load(first + q0))
        high = tl.minimum(high, tl.load(end + last))
    return low // S.keys * S.keys, high


@jit
def queries_of(k0, lengths, limits, S: tl.constexpr):
    """(first, end) of the queries that may attend to any key of a tile."""
    t, s = lengths
    _look, _sample, first, end, window = limits
    last = tl.minimum(k0 + S.keys, s) - 1
    low = k0 * 0
    high = low + t
    if S.causal:
        low = tl.maximum(low, k0 - (s - t))
    if window is not None:
        low = tl.maximum(low, k0 - (s - t) - window + 1)
        high = tl.minimum(high, last - (s - t) + window)
    if first is not None:
        low = tl.maximum(low, tl.load(first + k0))
        high = tl.minimum(high, tl.load(end + last))
    return low // S.queries * S.queries, high


@jit
def rms_root(scores, is_visible, HEADS: tl.constexpr, EPS: tl.constexpr):
    """[head or 1, query, key]: 1 / root mean square over HEADS heads; 0 at masked pairs."""
    return tl.where(is_visible, tl.rsqrt(tl.sum(scores * scores, 0) / HEADS + EPS)[None, :, :], 0.0)


@jit
def diagonals(x, HIGH: tl.constexpr):
    """[head, column] sums along the diagonals of [head, query, key] tiles of n queries and m keys, n <= m + 1.

    Column c is the sum over key - query = c - (n - 1), for m columns; HIGH = 1 gives the next m, the last ones empty.
    """
    n: tl.constexpr = x.shape[1]
    m: tl.constexpr = x.shape[2]
    i = tl.arange(0, n)[None, :, None]
    j = tl.arange(0, m)[None, None, :] + i + (HIGH * m - (n - 1))
    at = tl.broadcast_to(tl.minimum(tl.maximum(j, 0), m - 1), x.shape[0], n, m)
    return tl.sum(tl.where((j >= 0) & (j < m), tl.gather(x, at, 2), 0.0), 1)
