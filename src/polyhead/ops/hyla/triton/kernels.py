# mypy: disallow-untyped-defs=False
"""The kernels of HYLA and their launches: __init__.py has the equations, tiles.py the conventions.

One program holds a tile of queries with all heads (of keys, for the gradients of keys and values) and loops over the
tiles of the other side.  Sums over heads and sums over keys are batched products of small matrices: the first has one
matrix per key, the second one per query.

    code        a [head, query, key]    = normalised q k^T                   stack of heads (code.py)
    forward     z [key, query, width]   = a^T v     y = act(z)               stack of keys
                out [query, head, width] += a y                              stack of queries
    backward    dy [query, key, width]  = a^T dout  dz = dy act'(z)          stack of queries
                da [head, query, key]   = dout y^T + v dz^T                  stacks of queries and of keys
                ds from da (code.py),  dq += ds k,  dk += ds^T q,  dv += a dz

Wide values are cut into parts: each part gives a part of the output, and the gradients of q, k and bias are sums over
parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.triton.code import Config, Rows, code_tile, hidden_layer
from polyhead.ops.hyla.triton.gradients import hyla_keys, hyla_queries
from polyhead.ops.hyla.triton.tiles import (
    SMALLEST,
    Block,
    RuntimeMasks,
    Sight,
    block,
    dot,
    dots,
    jit,
    keys_of,
    limits,
    load_by_head,
    load_by_row,
    number,
    padded,
    pair,
    positive,
    rowwise,
    store_by_row,
    strides,
)
from polyhead.ops.latent_code import wide
from polyhead.spec import RMS_HEADS_EPS

NARROW = 64
"""Tiles narrower than this are not cut into halves: it would cost barriers and spare no spilling."""

PROGRAMS = 256
"""With fewer programs than half of this, several programs divide the keys of a tile of queries."""

SPLIT = 128
"""The fewest keys of one such program."""

PARTIAL = 1 << 26
"""The most numbers in the partial sums of a bias's gradient; they hold at least one tile of queries."""


# -------------------------------------------------------------------------------------------------------------- kernels
@jit
def hyla_forward(tensors, strides, t, s, settings, C: tl.constexpr):
    """The output of a tile of queries, from all keys or, divided over grid axis 1, from `share` keys."""
    q, k, v, bias, out = tensors
    to_q, to_k, to_v, to_out = strides
    scale, limits, share = settings
    tiles = tl.cdiv(t, C.sight.queries)
    q0 = (tiles - 1 - tl.program_id(0) % tiles) * C.sight.queries
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    call = (number(scale, C.dots.total), (t, s), limits)
    queries = load_by_head(q + b * to_q[0], q0, t, to_q, C.q)
    total = tl.full([C.out.tile.rows, C.out.tile.width_padded, C.out.tile.heads_padded], 0.0, C.dots.total)
    low, high = keys_of(q0, (t, s), limits, C.sight)
    if share is not None:
        low = tl.maximum(low, tl.program_id(1) * share)
        high = tl.minimum(high, (tl.program_id(1) + 1) * share)
    for k0 in range(low, high, C.sight.keys):
        keys = load_by_head(k + b * to_k[0], k0, s, to_k, C.k)
        values = load_by_row(v + b * to_v[0], k0, s, to_v, C.v.deep)
        a, _ = code_tile(queries, keys, bias, (b, q0, k0), call, C)
        a = a.to(values.dtype)
        z = hidden_layer(a, values, C)
        if C.relu:
            z = positive(z)
        y = tl.permute(z.to(values.dtype), (1, 2, 0))
        total += dot(y, tl.permute(a, (1, 2, 0)), C.dots)
    samples = tl.num_programs(0) // tiles
    total = tl.permute(total, (0, 2, 1))
    store_by_row(out + (b + tl.program_id(1) * samples) * to_out[0], q0, t, to_out, total, C.out.tile)


# ------------------------------------------------------------------------------------------------------------- launches
@dataclass(frozen=True)
class TileSettings:
    """Queries and keys of a tile, and Triton's num_warps and num_stages."""

    queries: int
    keys: int
    warps: int
    stages: int
    halves: bool = False  # is one half of a wide tile computed after the other?  Only the kernel of keys does so


def row(q: Tensor) -> tuple[int, bool]:
    """The padded number of heads, and whether a row of queries (all heads) is large.

    Heads of 16-bit numbers are padded to the number of terms that a product needs.
    """
    heads, most_bytes = max(2, triton.next_power_of_2(q.shape[2])), 1024
    if q.itemsize == 2:
        heads, most_bytes = padded(q.shape[2]), 2048
    return heads, heads * padded(q.shape[3]) * q.itemsize > most_bytes


def few(x: Block) -> Block:
    """A tile without further padding of heads, but with at least two.

    Triton compiles products with a single column wrongly.
    """
    return replace(x, heads_padded=max(2, triton.next_power_of_2(x.heads)))


def deep(x: Block) -> Block:
    """A tile with rows of zeros between heads, up to the number of terms that a product needs."""
    heads = max(SMALLEST, x.heads_padded)
    return replace(x, heads_padded=heads, spread=heads // x.heads_padded)


def cut(x: Block, halves: bool) -> tuple[Rows, Rows]:
    """Tiles of both halves of the width; both are of the whole width unless it is cut."""
    if not halves:
        return Rows(x, deep(x)), Rows(x, deep(x))
    half = replace(x, width_padded=x.width_padded // 2)
    second_half = replace(half, first=half.width_padded)
    return Rows(half, deep(half)), Rows(second_half, deep(second_half))


@dataclass(frozen=True)
class HylaKernelCall:
    """A call of the op, prepared for the kernels."""

    q: Tensor  # (b t h d)
    k: Tensor  # (b s g d)
    v: Tensor  # (b s g e)
    bias: Tensor | None  # (h t+s-1)
    limits: RuntimeMasks
    scale: float
    causal: bool
    normalise: str
    relu: bool
    shared: int  # bytes of shared memory per program
    tf32: bool  # may products of float32 round to tf32?

    def config(self, size: TileSettings) -> Config:
        h = self.q.shape[2]
        q = few(block(self.q, size.queries, h))
        k, v = few(block(self.k, size.keys, h)), few(block(self.v, size.keys, h))
        halves = size.halves and v.width_padded >= NARROW
        values = cut(v, halves)
        outputs = cut(replace(v, rows=size.queries, share=1), halves)
        return Config(
            q=q,
            k=k,
            v=values[0],
            out=outputs[0],
            more_v=values[1],
            more_out=outputs[1],
            halves=halves,
            sight=Sight(size.queries, size.keys, self.causal),
            dots=dots(self.v.dtype, self.tf32),
            normalise=self.normalise,
            relu=self.relu,
            eps=RMS_HEADS_EPS,
        )

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        size: TileSettings,
        extra_tensors: tuple[Tensor, ...],
        settings: tuple[Any, ...],
    ) -> None:
        """Launch a kernel that takes `extra_tensors`, with their strides, and further `settings`."""
        tensors = self.q, self.k, self.v, self.bias, *extra_tensors
        row_tensors = self.q, self.k, self.v, *extra_tensors
        first = tensors, tuple(map(strides, row_tensors)), self.q.shape[1], self.k.shape[1]
        args = *first, (pair(self.scale), self.limits, *settings), self.config(size)
        if all(grid):
            kernel[grid](*args, num_warps=size.warps, num_stages=size.stages)

    def pieces(self) -> Iterator[slice]:
        """The width of the values, cut into what one program can hold."""
        e, (heads, large) = self.v.shape[-1], row(self.q)
        most_bytes = 1024 if large else 2048
        step = max(SMALLEST, most_bytes // (heads * self.q.itemsize))
        for first in range(0, max(e, 1), step):
            yield slice(first, min(first + step, e))


def tile(kernel: str, problem: HylaKernelCall) -> TileSettings:
    """The tile of a kernel: it spills few registers and fits into shared memory.  The sizes were found by compiling.

    Products need 16 terms, so the other side of a tile has 16 rows.  With a bias a tile has at most as many queries as
    keys.
    """
    (heads, large), is_half = row(problem.q), problem.q.itemsize == 2
    has_little_memory = problem.shared < 200 << 10

    if kernel == "forward":
        # More queries to a tile reuse its keys and values more often, as long as the sums stay in registers.
        q = problem.config(TileSettings(16, 16, 8, 1)).q
        numbers = q.heads_padded * q.width_padded
        if not is_half:
            queries = 16 if numbers <= 512 else 8
            return TileSettings(queries, 16, 8, 1)
        most_numbers = 256 if problem.shared < 160 << 10 else 512
        queries = 32 if numbers <= most_numbers else 16
        # A second stage loads the next keys while these are multiplied; large rows have no memory for it.
        stages = 1 if large else 2
        return TileSettings(queries, 16, 8, stages)

    if kernel == "queries":
        if not large:
            return TileSettings(16, 16, 8, 1)
        if not is_half and has_little_memory and heads > 8:
            return TileSettings(2, 16, 8, 1)
        return TileSettings(8, 16, 8, 1)

    if is_half:
        # Two halves of the width, one after the other, so that the sums of both fit into registers.
        k = problem.config(TileSettings(16, 16, 8, 1)).k
        keys = 16 if k.heads_padded * k.width_padded <= 512 else 8
        return TileSettings(16, keys, 8, 1, halves=True)
    if large or heads > 32 or has_little_memory:
        return TileSettings(16, 8, 8, 1)
    return TileSettings(16, 16, 8, 1)


def prepare(x: AttentionCall, shared: int, tf32: bool) -> HylaKernelCall:
    """The call, prepared for the kernels."""
    q, k, v = rowwise(x.q), rowwise(x.k), rowwise(x.v)
    bias = x.bias
    if bias is not None:
        bias = bias.contiguous()
    sight, causal = limits(x.masks, *x.lengths), x.masks.causal
    return HylaKernelCall(q, k, v, bias, sight, x.score_scale, causal, x.normalise, x.act == "relu", shared, tf32)


def forward(problem: HylaKernelCall) -> Tensor:
    """The output (b t h e)."""
    q, k, v, size = problem.q, problem.k, problem.v, tile("forward", problem)
    (b, t, h, _), s, e = q.shape, k.shape[1], v.shape[-1]
    programs = b * triton.cdiv(t, size.queries)
    # Few programs leave most of a card idle: then several of them divide the keys, and their outputs are added.
    shares, share, dtype = 1, None, q.dtype
    if 2 * programs < PROGRAMS:
        shares = max(1, min(PROGRAMS // max(1, programs), triton.cdiv(s, SPLIT)))
    if shares > 1:
        share = triton.cdiv(triton.cdiv(s, shares), size.keys) * size.keys
        dtype = wide(q).dtype
    parts = torch.empty(shares, b, t, h, e, dtype=dtype, device=q.device)
    for piece in problem.pieces():
        part, out = replace(problem, v=v[..., piece]), parts.flatten(0, 1)[..., piece]
        part.launch(hyla_forward, (programs, shares), size, (out,), (share,))
    if shares == 1:
        return parts.squeeze_(0)  # not a view: autograd forbids writing to a view that a custom op returns
    return parts.sum(0).to(q.dtype)


def backward(problem: HylaKernelCall, dout: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and, if given, the bias, from that of the output.

    The width of the values is cut into pieces: each gives its part of dv, and a term of dq, dk and dbias.
    """
    dout = rowwise(dout)
    q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
    h, g, (first, *others) = q.shape[2], k.shape[2], problem.pieces()
    # What is summed, over pieces or over the query heads that share a key, is summed in the wider dtype.
    sum_dtype = wide(q).dtype
    of_q, of_k, of_v = q.dtype, k.dtype, v.dtype
    if others:
        of_q = of_k = sum_dtype
    if h > g:
        of_k = of_v = sum_dtype
    dv = _empty(v, h, of_v)
    dbias = None
    if bias is not None:
        dbias = torch.zeros(bias.shape, dtype=sum_dtype, device=q.device)

    def terms(piece: slice) -> tuple[Tensor, Tensor]:
        """The terms of dq and dk; writes its piece of dv, and adds its term to dbias."""
        dq, dk, grad = _empty(q, h, of_q), _empty(k, h, of_k), dout[..., piece]
        part = replace(problem, v=v[..., piece])
        query_grads(part, grad, (dq, dbias))
        key_grads(part, grad, (dk, dv[..., piece]))
        return dq, dk

    dq, dk = terms(first)
    for piece in others:
        more_q, more_k = terms(piece)
        dq, dk = dq + more_q, dk + more_k
    if h > g:
        # Query heads that share a key: (b s h d) -> (b s g h/g d), summed to (b s g d).
        dk, dv = dk.unflatten(2, (g, -1)).sum(3), dv.unflatten(2, (g, -1)).sum(3)
    grads = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    if bias is None or dbias is None:
        return grads
    return *grads, dbias.to(bias.dtype)


def _empty(like: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(b n h c), one for each query head."""
    return torch.empty(*like.shape[:2], heads, like.shape[3], dtype=dtype, device=like.device)


def query_grads(problem: HylaKernelCall, dout: Tensor, grads: tuple[Tensor, Tensor | None]) -> None:
    """Write the gradient of q and add that of the bias, in groups of query tiles to bound the partial sums."""
    size, b, (dq, dbias) = tile("queries", problem), problem.q.shape[0], grads
    tiles = triton.cdiv(problem.q.shape[1], size.queries)
    if dbias is None:
        problem.launch(hyla_queries, (tiles * b,), size, (dout, dq), (0, tiles * size.queries, None))
        return
    # Each program writes its own row of partial sums, which are then added: no atomic addition, the same result twice.
    tiles_per_launch = max(1, min(tiles, PARTIAL // max(1, b * dbias.numel())))
    for first in range(0, tiles, tiles_per_launch):
        count = min(tiles_per_launch, tiles - first)
        partial = dbias.new_zeros(count * b, *dbias.shape)
        settings = first * size.queries, count * size.queries, partial
        problem.launch(hyla_queries, (count * b,), size, (dout, dq), settings)
        dbias += partial.sum(0)


def key_grads(problem: HylaKernelCall, dout: Tensor, grads: tuple[Tensor, Tensor]) -> None:
    """Write the gradients of k and v, for every query head."""
    size, (b, s) = tile("keys", problem), problem.k.shape[:2]
    problem.launch(hyla_keys, (triton.cdiv(s, size.keys) * b,), size, (dout, *grads), ())
