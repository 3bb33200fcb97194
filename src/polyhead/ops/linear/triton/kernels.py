# mypy: disallow-untyped-defs=False
"""Kernels of linear attention: two of them, each forwards and backwards in time.

    sums    S_n   = sum over the keys of all chunks before n (after n, if backwards) of x_j y_j^T
    read    out_i = sum_(own chunk, j <= i (j >= i)) (a_i . x_j) y_j + a_i S_n,     all times the scale

    out     a = q      x = k      y = v       forwards
    dq      a = dout   x = v      y = k       forwards, the same states transposed
    dk      a = v      x = dout   y = q       backwards, states R_n = sum q_i dout_i^T over later chunks, transposed
    dv      a = k      x = q      y = dout    backwards, the states R_n

Backwards, x and y have the heads of queries; those of a group are summed in a fixed order, so gradients are
deterministic.  Positions are those of keys: query i is at i + s - t.  Chunks have a fixed length, independent of packed
sequences.  The state that enters a chunk belongs to the sequence at its border; it restarts at 0 when the sequence
changes.  This file imports triton, so it is imported only where a kernel is about to run.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.latent_code import at_least_float32
from polyhead.ops.triton_tiles import Dots, Launch, dot, dots, jit, number, padded, pair, strides

WIDTH = {2: 64, 4: 32, 8: 32}
"""Bytes of a number -> the most columns of a state that one program sums or reads."""


@dataclass(frozen=True)
class Compiled:
    """Compile-time constants: states are (d e); `read` gives rows of width e, or d if the states are transposed."""

    chunk: int
    d: int
    e: int
    block_d: int
    block_e: int
    backwards: bool
    transposed: bool
    dots: Dots
    state_dots: Dots
    in_two: bool  # states are read as sums of two numbers that are exact in tf32


def plan(q: Tensor, v: Tensor, chunk: int) -> Compiled:
    """The constants for queries and values of these widths and dtypes."""
    d, e = q.shape[-1], v.shape[-1]
    own = dots(q.dtype)
    if q.dtype == torch.float32 and own.precision == "ieee":
        own = replace(own, precision="tf32x3")  # about as exact; "ieee" would spill thousands of bytes
    # States need more than half precision and more than tf32, which rounds 4099 to 4096.  tf32 is exact for queries.
    half = q.dtype.itemsize == 2
    states = replace(own, precision="tf32", upcast=True) if half else own
    width_d, width_e = (min(WIDTH[q.dtype.itemsize], padded(n)) for n in (d, e))
    return Compiled(chunk, d, e, width_d, width_e, False, False, own, states, half)


# ------------------------------------------------------------------------------------------------------------- launches
def states_launch(x: Tensor, y: Tensor, sequence: Tensor | None, lengths: tuple[int, int], states: Tensor, C: Compiled):
    """The launch that fills the states (b g n d e) of the last n chunks from x and y: keys (b s g d) and values, or
    queries and gradients."""
    b, groups = states.shape[:2]
    blocks = triton.cdiv(C.d, C.block_d) * triton.cdiv(C.e, C.block_e)
    args = (x, y, sequence, states), (strides(x), strides(y)), *lengths, (groups, x.shape[2] // groups), C
    return Launch(linear_sums, (blocks * b * groups,), args, 4 if C.dots.precision == "ieee" else 8, 2)


def read_launch(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], sequence: Tensor | None, out: Tensor, scale: float, C: Compiled
):
    """The launch that fills `out`, given a, x, y and the states."""
    a, x, y, states = tensors
    b, heads, groups = a.shape[0], a.shape[2], states.shape[1]
    t, s = (x.shape[1], a.shape[1]) if C.backwards else (a.shape[1], x.shape[1])
    grid = triton.cdiv(C.d if C.transposed else C.e, C.block_d if C.transposed else C.block_e)
    sizes = pair(scale), heads, heads // groups, x.shape[2] // groups
    args = (a, x, y, sequence, states, out), tuple(map(strides, (a, x, y, out))), t, s, sizes, C
    return Launch(linear_read, (grid * states.shape[2] * b * heads,), args, 4 if C.dots.precision == "ieee" else 8, 2)


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor, sequence: Tensor | None, out: Tensor, *, scale: float, chunk: int
) -> list[Launch]:
    """Launches that fill `out` (b t h e), except for queries before the first key."""
    C = plan(q, v, chunk)
    states = new_states(q, k, v, C, backwards=False)
    lengths = q.shape[1], k.shape[1]
    return [
        states_launch(k, v, sequence, lengths, states, C),
        read_launch((q, k, v, states), sequence, out, scale, C),
    ]


def backward_launches(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    sequence: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    chunk: int,
) -> list[Launch]:
    """Launches that fill the gradients of q, k and v, given q, k, v and the gradient of the output."""
    q, k, v, dout = tensors
    dq, dk, dv = grads
    forwards = plan(q, v, chunk)
    backwards = replace(forwards, backwards=True)
    lengths = q.shape[1], k.shape[1]
    states = new_states(q, k, v, forwards, backwards=False)
    later = new_states(q, k, v, backwards, backwards=True)
    return [
        states_launch(k, v, sequence, lengths, states, forwards),
        read_launch((dout, v, k, states), sequence, dq, scale, replace(forwards, transposed=True)),
        states_launch(q, dout, sequence, lengths, later, backwards),
        read_launch((v, dout, q, later), sequence, dk, scale, replace(backwards, transposed=True)),
        read_launch((k, q, dout, later), sequence, dv, scale, backwards),
    ]


def new_states(q: Tensor, k: Tensor, v: Tensor, C: Compiled, *, backwards: bool) -> Tensor:
    """Uninitialised states (b g n d e) for the chunks that are read; forwards, those from the first query on."""
    t, s = q.shape[1], k.shape[1]
    first = 0 if backwards else max(0, s - t) // C.chunk
    chunks = triton.cdiv(s, C.chunk) - first
    return torch.empty(q.shape[0], k.shape[2], chunks, C.d, C.e, dtype=at_least_float32(q.dtype), device=q.device)


def launches(q: Tensor, k: Tensor, v: Tensor, sequence: Tensor | None, chunk: int) -> list[Launch]:
    """All launches of a call and its gradients, without executing them; works on meta tensors."""
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    found = forward_launches(q, k, v, sequence, out, scale=1.0, chunk=chunk)
    return found + backward_launches((q, k, v, out), sequence, (q, k, v), scale=1.0, chunk=chunk)


# -------------------------------------------------------------------------------------------------------------- kernels
@jit
def rows(start, stride, where, c, C: tl.constexpr):
    """[row, column] of one head of a sample; zeros where not `ok`.  The chunk's first row may be negative."""
    head, row, ok = where
    i = tl.arange(0, C.chunk)[:, None]
    start += tl.cast(head, tl.int64) * stride[2] + tl.cast(row, tl.int64) * stride[1]
    at = start + i * stride[1] + c[0][None, :]
    return tl.load(at, mask=ok[:, None] & c[1][None, :], other=0.0)


@jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr):
    """[row, column] of zeros for a sum."""
    return tl.zeros((ROWS, COLUMNS), C.dots.total)


@jit
def columns(first, BLOCK: tl.constexpr, END: tl.constexpr):
    """Indices of BLOCK columns, and which of them exist."""
    c = first + tl.arange(0, BLOCK)
    return c, c < END


@jit
def entering(sequence, p, s, C: tl.constexpr):
    """The sequence at the border where the state enters the chunk at position p."""
    return tl.load(sequence + (tl.minimum(p + C.chunk, s) - 1 if C.backwards else p))


@jit
def leaving(sequence, p, s, C: tl.constexpr):
    """The sequence just beyond the other border of the chunk, or -1."""
    at = p - 1 if C.backwards else p + C.chunk
    return tl.load(sequence + at, mask=(at >= 0) & (at < s), other=-1)


@jit
def linear_sums(tensors, strides, t, s, sizes, C: tl.constexpr):
    x, y, sequence, states = tensors
    groups, share = sizes  # heads of the states, and heads of x and y for each of them
    blocks_d: tl.constexpr = (C.d + C.block_d - 1) // C.block_d
    blocks_e: tl.constexpr = (C.e + C.block_e - 1) // C.block_e
    program = tl.program_id(0)
    e = columns(program % blocks_e * C.block_e, C.block_e, C.e)
    d = columns(program // blocks_e % blocks_d * C.block_d, C.block_d, C.d)
    sample_group = program // (blocks_d * blocks_e)
    b = tl.cast(sample_group // groups, tl.int64)
    x += b * strides[0][0]
    y += b * strides[1][0]
    chunks = tl.cdiv(s, C.chunk)
    first = s * 0 if C.backwards else tl.maximum(0, s - t) // C.chunk
    shift = s - t if C.backwards else s * 0
    states += tl.cast(sample_group, tl.int64) * (chunks - first) * (C.d * C.e) + d[0][:, None] * C.e + e[0][None, :]
    total = zeros(C.block_d, C.block_e, C)
    i = tl.arange(0, C.chunk)
    for m in range(chunks):
        n = chunks - 1 - m if C.backwards else m
        p = n * C.chunk
        tl.store(
            states + tl.cast(n - first, tl.int64) * (C.d * C.e), total, (n >= first) & d[1][:, None] & e[1][None, :]
        )
        ok = (p + i < s) & (p + i >= shift)
        if sequence is not None:
            goes_on = leaving(sequence, p, s, C)
            ok = ok & (tl.load(sequence + p + i, mask=p + i < s, other=-2) == goes_on)
            total = tl.where(entering(sequence, p, s, C) == goes_on, total, 0.0)
        for r in range(share):
            head = sample_group % groups * share + r
            own_x = rows(x, strides[0], (head, p - shift, ok), d, C)
            own_y = rows(y, strides[1], (head, p - shift, ok), e, C)
            total += dot(tl.trans(own_x), own_y, C.dots)


@jit
def own_chunk(a, xs, strides, where, sizes, C: tl.constexpr):
    """[row, column]: the part of the output from the chunk's own keys; `where` gives rows, columns and visible
    pairs."""
    x, y = xs
    at_a, head, row, ok, look, c = where
    scale, share = sizes
    inner: tl.constexpr = C.e if C.transposed else C.d
    block_inner: tl.constexpr = C.block_e if C.transposed else C.block_d
    total = zeros(C.chunk, c[0].shape[0], C)
    for r in range(share):
        scores = zeros(C.chunk, C.chunk, C)
        for k0 in range(0, inner, block_inner):
            k = columns(k0, block_inner, inner)
            left, right = rows(a, strides[0], at_a, k, C), rows(x, strides[1], (head + r, row, ok), k, C)
            scores += dot(left, tl.trans(right), C.dots)
        seen = tl.where(look, scores * number(scale, C.dots.total), 0.0).to(y.dtype.element_ty)
        total += dot(seen, rows(y, strides[2], (head + r, row, ok), c, C), C.dots)
    return total


@jit
def linear_read(tensors, strides, t, s, sizes, C: tl.constexpr):
    a, x, y, sequence, states, out = tensors
    scale, heads, per_state, share = sizes  # heads of a; of those, to each state; heads of x and y to each state
    # Products of a and x run over `inner` columns, the output has `outer`.
    inner: tl.constexpr = C.e if C.transposed else C.d
    outer: tl.constexpr = C.d if C.transposed else C.e
    block_inner: tl.constexpr = C.block_e if C.transposed else C.block_d
    block_outer: tl.constexpr = C.block_d if C.transposed else C.block_e
    blocks: tl.constexpr = (outer + block_outer - 1) // block_outer
    first = s * 0 if C.backwards else tl.maximum(0, s - t) // C.chunk
    chunks = tl.cdiv(s, C.chunk) - first
    program = tl.program_id(0)
    c = columns(program % blocks * block_outer, block_outer, outer)
    n = program // blocks % chunks
    sample_head = program // (blocks * chunks)
    b = tl.cast(sample_head // heads, tl.int64)
    head = sample_head % heads
    p = (first + n) * C.chunk
    place = p + tl.arange(0, C.chunk)
    shift_a = s * 0 if C.backwards else s - t
    shift_x = s - t if C.backwards else s * 0
    ok = (place < s) & (place >= shift_a)
    ok_x = (place < s) & (place >= shift_x)
    look = place[:, None] <= place[None, :] if C.backwards else place[:, None] >= place[None, :]
    reads = ok
    if sequence is not None:
        own = tl.load(sequence + place, mask=place < s, other=-1)
        look = look & (own[:, None] == own[None, :])
        reads = ok & (own == entering(sequence, p, s, C))
    a += b * strides[0][0]
    xs = x + b * strides[1][0], y + b * strides[2][0]
    where = (head, p - shift_a, ok), head // per_state * share, p - shift_x, ok_x, look, c
    total = own_chunk(a, xs, strides, where, (scale, share), C)
    state = tl.cast(sample_head // per_state, tl.int64) * chunks + n
    states += state * (C.d * C.e)
    for k0 in range(0, inner, block_inner):
        k = columns(k0, block_inner, inner)
        left = rows(a, strides[0], (head, p - shift_a, reads), k, C).to(C.state_dots.total)
        at = c[0][None, :] * C.e + k[0][:, None] if C.transposed else k[0][:, None] * C.e + c[0][None, :]
        right = tl.load(states + at, mask=k[1][:, None] & c[1][None, :], other=0.0)
        if C.in_two:
            high = (right.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # ten bits of the fraction
            total += dot(left, right - high, C.state_dots) * number(scale, C.dots.total)
            right = high
        total += dot(left, right, C.state_dots) * number(scale, C.dots.total)
    at = tl.cast(head, tl.int64) * strides[3][2] + tl.cast(p - shift_a, tl.int64) * strides[3][1]
    at += (place - p)[:, None] * strides[3][1] + c[0][None, :]
    tl.store(out + b * strides[3][0] + at, total.to(out.dtype.element_ty), mask=ok[:, None] & c[1][None, :])
