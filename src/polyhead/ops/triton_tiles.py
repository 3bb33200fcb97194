# mypy: disallow-untyped-defs=False
"""Building blocks of the Triton kernels: tiles of (b n h d) tensors, products, who sees whom, launches.

This file imports triton, so it is imported only where a kernel is about to run.

A kernel takes at most six arguments, by this convention:

    tensors    tuple of pointers; None where a tensor is absent
    strides    tuple of (sample, row, head) strides; the last dimension is contiguous
    t, s       numbers of queries and keys: never specialised, so that a new length compiles nothing
    settings   tuple: the scale as a `pair`, `Limits`, whatever else varies from call to call (`options` would be
               a SyntaxError when a GPU launches it: triton's launcher has an argument of that name)
    C          frozen dataclass of what is compiled in

Offsets of samples, heads and first rows are 64 bit wide, those of rows within a tile 32.
"""

import ctypes
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.cards import tf32
from polyhead.ops.latent_code import at_least_float32, sequence_of

SMALLEST = 16
"""The matrix units multiply tiles of at least so many rows, columns and terms of 16 bits."""

FARTHEST = 1 << 30
"""A window hides no more from here on, and sums of places and windows stay within 32 bits."""

STEEPEST = 1 << 24
"""Stride of rows, at most: offsets within a tile are 32 bits wide."""

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
POINTERS = {dtype: f"*{kind.name}" for dtype, kind in TYPES.items()} | {torch.int32: "*i32", torch.uint8: "*u8"}


# ------------------------------------------------------------------------------------------------ what is compiled in
def jit(f: Callable[..., Any]) -> Any:
    """triton.jit for our convention; of `f` itself, as a wrapper that checks annotations has no source to compile."""
    f = inspect.unwrap(f)
    return triton.jit(f, do_not_specialize=[name for name in ("t", "s") if name in inspect.signature(f).parameters])


@dataclass(frozen=True)
class Block:
    """Sizes of one tile of a tensor (b n h d): those that are real, and the powers of two that hold them.

    `share` heads of a kernel read one and the same head of the tensor.  Each has `spread` rows of a tile [row, head,
    width], all but the first of zeros.
    """

    rows: int
    heads: int
    width: int
    heads_padded: int
    width_padded: int
    share: int = 1
    spread: int = 1


@dataclass(frozen=True)
class Dots:
    """How matrices are multiplied: `total` sums in at least float32; `upcast` is for the interpreter."""

    total: tl.dtype
    precision: str
    upcast: bool


@dataclass(frozen=True)
class Sight:
    """Tiles of pairs, and the part of the masks that is compiled in."""

    queries: int
    keys: int
    causal: bool


class Limits(NamedTuple):
    """The part of the masks that is not; each is None where it limits nothing."""

    look: Tensor | None  # (b|1 s), True at keys that may be looked at
    sample: int | None  # stride of its samples
    first: Tensor | None  # (t,) first row of each row's own sequence
    end: Tensor | None  # (t,) one after its last row
    window: int | None


def padded(n: int) -> int:
    """The power of two that holds n, and is not too small for the matrix units."""
    return max(SMALLEST, triton.next_power_of_2(n))


def block(x: Tensor, rows: int, heads: int) -> Block:
    """The tile of `rows` rows of (b n g d) that a kernel of so many heads reads or writes."""
    return Block(rows, heads, x.shape[-1], padded(heads), padded(x.shape[-1]), heads // x.shape[2])


def dots(dtype: torch.dtype) -> Dots:
    """Products of that dtype; float32 goes through the tensor cores where PyTorch's own products may."""
    fast = dtype == torch.float32 and tf32()
    # The interpreter multiplies the bit patterns of bfloat16.
    upcast = triton.knobs.runtime.interpret and dtype.itemsize == 2
    return Dots(TYPES[at_least_float32(dtype)], "tf32" if fast else "ieee", upcast)


def pair(x: float) -> tuple[float, float]:
    """Two numbers of single precision whose sum is x: a kernel takes no wider ones."""
    high = ctypes.c_float(x).value  # a tensor would lie on the default device, and reading it would wait
    return high, x - high


def limits(mask: Tensor | None, cu_seqlens: Tensor | None, window: int | None, t: int) -> Limits:
    """What a kernel needs of a mask of keys (b|1 s), of packed sequences and of a window."""
    first = end = None
    window = None if window is None else min(window, FARTHEST)
    if cu_seqlens is not None:
        number = sequence_of(cu_seqlens, t)
        edges = torch.cat((cu_seqlens.new_zeros(1), cu_seqlens[1:], cu_seqlens.new_full((1,), t)))
        first, end = edges[number], edges[number + 1]
    if mask is None:
        return Limits(None, None, first, end, window)
    look = rowwise(mask).view(torch.uint8)  # may be part of a wider mask
    return Limits(look, look.stride(0) * (mask.shape[0] > 1), first, end, window)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of samples, rows and heads."""
    return x.stride(0), x.stride(1), x.stride(2)


def rowwise(x: Tensor) -> Tensor:
    """`x` with its last dimension contiguous and rows that are not too far apart: itself, or else a copy."""
    return x if x.stride(-1) == 1 and x.stride(1) <= STEEPEST else x.contiguous()


# ---------------------------------------------------------------------------------------------------------- launches
@dataclass(frozen=True)
class Launch:
    """A kernel with all it is launched with; `source` is what a compiler ahead of time needs of it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # the last is compiled in
    warps: int
    stages: int

    def __call__(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](*self.args, num_warps=self.warps, num_stages=self.stages)

    def source(self) -> Any:
        """For triton.compile, with what triton finds out about arguments when it launches: ones, multiples of 16."""
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {(len(self.args) - 1,): self.args[-1]}
        attributes = {}
        for n, (name, x) in enumerate(zip(self.kernel.arg_names, self.args[:-1], strict=False)):
            special = name not in self.kernel.do_not_specialize
            signature[name] = _kind(x, special)
            for path, leaf in _leaves(x, (n,)):
                if _kind(leaf, special) == "constexpr":
                    constants[path] = leaf
                elif special and (isinstance(leaf, Tensor) or (isinstance(leaf, int) and leaf % 16 == 0)):
                    attributes[path] = [["tt.divisibility", 16]]
        signature[self.kernel.arg_names[-1]] = "constexpr"
        return triton.compiler.ASTSource(self.kernel, signature, constants, attributes)


def _kind(x: Any, special: bool) -> Any:
    if isinstance(x, tuple):
        return tuple(_kind(y, special) for y in x)
    if isinstance(x, Tensor):
        return POINTERS[x.dtype]
    if x is None or (special and isinstance(x, int) and x == 1):
        return "constexpr"
    return "i32" if isinstance(x, int) and -(2**31) <= x < 2**31 else "i64" if isinstance(x, int) else "fp32"


def _leaves(x: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(x, tuple):
        for n, y in enumerate(x):
            yield from _leaves(y, (*path, n))
    else:
        yield path, x


# ------------------------------------------------------------------------------------------------------ inside kernels
@jit
def load_by_head(start, row, end, strides, B: tl.constexpr):
    """[head, row, width] of the rows from `row` on, zeros from `end` on; `start` is the sample's first number."""
    h = tl.arange(0, B.heads_padded)[:, None, None]
    i = tl.arange(0, B.rows)[None, :, None]
    c = tl.arange(0, B.width_padded)[None, None, :]
    at = start + tl.cast(row, tl.int64) * strides[1] + tl.cast(h // B.share, tl.int64) * strides[2] + i * strides[1] + c
    return tl.load(at, mask=(h < B.heads) & (row + i < end) & (c < B.width), other=0.0)


@jit
def load_by_row(start, row, end, strides, B: tl.constexpr):
    """[row, head, width]."""
    i = tl.arange(0, B.rows)[:, None, None]
    place = tl.arange(0, B.heads_padded)[None, :, None]
    c = tl.arange(0, B.width_padded)[None, None, :]
    h = place // B.spread
    at = start + tl.cast(row, tl.int64) * strides[1] + tl.cast(h // B.share, tl.int64) * strides[2] + i * strides[1] + c
    here = (h < B.heads) & (place % B.spread == 0)
    return tl.load(at, mask=here & (row + i < end) & (c < B.width), other=0.0)


@jit
def store_by_head(start, row, end, strides, x, B: tl.constexpr):
    """What `load_by_head` reads, written; every head of a kernel has a head of the tensor to itself."""
    h = tl.arange(0, B.heads_padded)[:, None, None]
    i = tl.arange(0, B.rows)[None, :, None]
    c = tl.arange(0, B.width_padded)[None, None, :]
    at = start + tl.cast(row, tl.int64) * strides[1] + tl.cast(h, tl.int64) * strides[2] + i * strides[1] + c
    tl.store(at, x.to(start.dtype.element_ty), mask=(h < B.heads) & (row + i < end) & (c < B.width))


@jit
def store_by_row(start, row, end, strides, x, B: tl.constexpr):
    """What `load_by_row` reads, written."""
    i = tl.arange(0, B.rows)[:, None, None]
    h = tl.arange(0, B.heads_padded)[None, :, None]
    c = tl.arange(0, B.width_padded)[None, None, :]
    at = start + tl.cast(row, tl.int64) * strides[1] + tl.cast(h, tl.int64) * strides[2] + i * strides[1] + c
    tl.store(at, x.to(start.dtype.element_ty), mask=(h < B.heads) & (row + i < end) & (c < B.width))


@jit
def dot(x, y, D: tl.constexpr):
    """x @ y for stacks of matrices, summed in D.total."""
    if D.upcast:
        x = x.to(D.total)
        y = y.to(D.total)
    return tl.dot(x, y, input_precision=D.precision, out_dtype=D.total)


@jit
def number(pair, dtype: tl.constexpr):
    """What `pair` took apart."""
    return tl.cast(pair[0], dtype) + tl.cast(pair[1], dtype)


@jit
def by_offset(start, q0, k0, lengths, S: tl.constexpr, B: tl.constexpr):
    """[head, query, key] of a bias by offset (h t+s-1): column key - query + t - 1; B tells the heads."""
    t, s = lengths
    h = tl.arange(0, B.heads_padded)[:, None, None]
    i = q0 + tl.arange(0, S.queries)[None, :, None]
    j = k0 + tl.arange(0, S.keys)[None, None, :]
    return tl.load(start + h * (t + s - 1) + j - i + t - 1, mask=(h < B.heads) & (i < t) & (j < s), other=0.0)


@jit
def visible(b, q0, k0, lengths, limits, S: tl.constexpr):
    """[query, key], True where looking is allowed; pairs outside the lengths are not."""
    t, s = lengths
    look, sample, first, end, window = limits
    i = q0 + tl.arange(0, S.queries)
    j = k0 + tl.arange(0, S.keys)
    seen = (i < t)[:, None] & (j < s)[None, :]
    if S.causal:
        seen = seen & (j[None, :] <= i[:, None] + (s - t))
    if window is not None:
        ahead = j[None, :] - i[:, None] - (s - t)
        seen = seen & (ahead < window) & (ahead > -window)
    if look is not None:
        seen = seen & (tl.load(look + b * sample + j, mask=j < s, other=0) != 0)[None, :]
    if first is not None:
        lowest = tl.load(first + i, mask=i < t, other=0)
        highest = tl.load(end + i, mask=i < t, other=0)
        seen = seen & (j[None, :] >= lowest[:, None]) & (j[None, :] < highest[:, None])
    return seen


@jit
def keys_of(q0, lengths, limits, S: tl.constexpr):
    """(first, end) of the keys that any query of a tile may see, as far as causality, window and packing say.

    The first is a multiple of the tile's keys, so that programs which share out the keys cut them at the same places.
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
    """(first, end) of the queries that may see any key of a tile."""
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
def rms_root(scores, seen, HEADS: tl.constexpr, EPS: tl.constexpr):
    """[head or 1, query, key] one over the root of the mean square of HEADS heads; 0 at masked pairs."""
    return tl.where(seen, tl.rsqrt(tl.sum(scores * scores, 0) / HEADS + EPS)[None, :, :], 0.0)


@jit
def diagonals(x, HIGH: tl.constexpr):
    """[head, column] sums along the diagonals of [head, query, key] tiles of n queries and m keys, n <= m + 1.

    Column c holds key - query = c - (n - 1), for m columns; with HIGH = 1 the next m, the last of which are empty.
    """
    n: tl.constexpr = x.shape[1]
    m: tl.constexpr = x.shape[2]
    i = tl.arange(0, n)[None, :, None]
    j = tl.arange(0, m)[None, None, :] + i + (HIGH * m - (n - 1))
    at = tl.broadcast_to(tl.minimum(tl.maximum(j, 0), m - 1), x.shape[0], n, m)
    return tl.sum(tl.where((j >= 0) & (j < m), tl.gather(x, at, 2), 0.0), 1)
