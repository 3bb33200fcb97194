# mypy: disallow-untyped-defs=False
"""Kernels of HYLA: the code of a tile of pairs and its gradient, and the sums that a softmax over keys needs first.

    rms, identity   a = root s                          ds = root (da - a mean_h(a da)); the mean only for rms
    softmax         a = exp(s - top) share              ds = a (da - delta)
                    top = max_keys s                    delta = sum_keys a da
                    share = 1 / sum_keys exp(s - top)

`top` and `share` are the two rows of `softmax` (b t 2 h); `delta` is (b t 1 h).  Separate kernels compute them, because
they are sums over keys.  One number in place of two, the log-sum-exp, would be rounded, and weights with it by as much
as the rounding of a score.
"""

from dataclasses import dataclass

import triton.language as tl

from polyhead.ops.triton_tiles import (
    Block,
    CompiledIn,
    Dots,
    Sight,
    by_offset,
    dot,
    jit,
    keys_of,
    load_by_head,
    load_by_row,
    number,
    positive,
    rms_root,
    visible,
)


@dataclass(frozen=True)
class Rows(CompiledIn):
    """Tiles [row, head, width] of values or outputs."""

    tile: Block
    deep: Block  # with rows of zeros between heads, if there are fewer heads than a product needs terms


@dataclass(frozen=True)
class Config:
    """Compile-time constants."""

    q: Block
    k: Block
    v: Rows
    out: Rows
    more_v: Rows  # the second half of the width, if `halves`
    more_out: Rows
    halves: bool  # is one half of the width computed after the other?
    sight: Sight
    dots: Dots
    normalise: str
    relu: bool
    eps: float


@jit
def score_tile(queries, keys, bias, at, call, C: tl.constexpr):
    """[head, query, key] scores of a tile, 0 at masked pairs, and [head or 1, query, key] whether a pair is visible.

    A bias of -inf masks a pair of its head.
    """
    b, q0, k0 = at
    scale, lengths, limits, _softmax = call
    # Not a product alone: a compiler would round it in some kernels, and in others only its difference to `top`.
    added = 0.0
    if bias is not None:
        added = by_offset(bias, q0, k0, lengths, C.sight, C.q).to(C.dots.total)
    scores = tl.fma(dot(queries, tl.permute(keys, (0, 2, 1)), C.dots), scale, added)
    seen = visible(b, q0, k0, lengths, limits, C.sight)[None, :, :]
    if bias is not None:
        seen = seen & (scores != float("-inf"))
    return tl.where(seen, scores, 0.0), seen


@jit
def code_tile(queries, keys, bias, at, call, C: tl.constexpr):
    """[head, query, key] code of a tile, and its factor `root` [head or 1, query, key], 0 at masked pairs."""
    b, q0, _k0 = at
    _scale, lengths, _limits, softmax = call
    scores, seen = score_tile(queries, keys, bias, at, call, C)
    root = seen.to(C.dots.total)
    if C.normalise == "softmax":
        top = load_sums(softmax, (b, q0, 0), 2, lengths[0], C)[:, :, None]
        share = load_sums(softmax, (b, q0, 1), 2, lengths[0], C)[:, :, None]
        scores = tl.exp(tl.where(seen, scores - top, 0.0))
        root = tl.where(seen, share, 0.0)
    if C.normalise == "rms_heads":
        root = rms_root(scores, seen, C.q.heads, C.eps)
    return scores * root, root


@jit
def load_rows(start, row, end, strides, R: tl.constexpr):
    """A tile [row, head, width], and the same with rows of zeros between heads if a product needs more terms."""
    x = load_by_row(start, row, end, strides, R.tile)
    deep = x
    if R.deep.spread > 1:
        deep = load_by_row(start, row, end, strides, R.deep)
    return x, deep


@jit
def terms(x, DEEP: tl.constexpr):
    """[i, j, head] with every head repeated: the factors of a tile with rows of zeros between heads."""
    if DEEP.spread > 1:
        x = tl.broadcast_to(tl.expand_dims(x, 3), (x.shape[0], x.shape[1], x.shape[2], DEEP.spread))
        x = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] * DEEP.spread))
    return x


@jit
def hidden_layer(a, values, C: tl.constexpr):
    """[key, query, width]: sums over heads of codes [head, query, key] times values [key, head, width]."""
    return dot(terms(tl.permute(a, (2, 1, 0)), C.v.deep), values, C.dots)


@jit
def hidden_backward(a, values, grads, C: tl.constexpr):
    """The hidden layers of a tile and their gradient [key, query, width], in a part of the width.

    The mask is from rounded numbers where that spills no registers: in the kernel of keys.
    """
    dy = dot(terms(tl.permute(a, (1, 2, 0)), C.out.deep), grads[1], C.dots)
    dz = tl.permute(dy.to(a.dtype), (1, 0, 2))
    z = hidden_layer(a, values[1], C)
    y = z
    if C.relu:
        y = positive(z)
        if not C.halves:
            dz = tl.where(z <= 0, tl.zeros_like(dz), dz)
    y = y.to(a.dtype)
    if C.relu and C.halves:
        dz = tl.where(y == 0, tl.zeros_like(dz), dz)
    return y, dz


@jit
def through_hidden(dz, values, C: tl.constexpr):
    """The gradient of a tile's codes through its hidden layers, laid out by key; `through_output` has the other term.

    Few heads become columns of a product: tensor cores need 8 columns, but 16 rows and terms.
    """
    if C.v.deep.spread > 1:
        x = dot(dz, tl.permute(values[0], (0, 2, 1)), C.dots)
    else:
        x = dot(values[0], tl.permute(dz, (0, 2, 1)), C.dots)
    return x


@jit
def through_output(y, grads, C: tl.constexpr):
    """The other term, laid out by query."""
    if C.v.deep.spread > 1:
        x = dot(tl.permute(y, (1, 0, 2)), tl.permute(grads[0], (0, 2, 1)), C.dots)
    else:
        x = dot(grads[0], tl.permute(y, (1, 2, 0)), C.dots)
    return x


@jit
def from_keys(x, C: tl.constexpr):
    """The result of `through_hidden` as [head, query, key]."""
    return tl.permute(x, (2, 1, 0)) if C.v.deep.spread > 1 else tl.permute(x, (1, 2, 0))


@jit
def from_queries(x, C: tl.constexpr):
    """The result of `through_output` as [head, query, key]."""
    return tl.permute(x, (2, 0, 1)) if C.v.deep.spread > 1 else tl.permute(x, (1, 0, 2))


@jit
def width_backward(a, values, grads, C: tl.constexpr):
    """The gradients of a tile's codes and hidden layers."""
    y, dz = hidden_backward(a, values, grads, C)
    da = from_keys(through_hidden(dz, values, C), C)
    da += from_queries(through_output(y, grads, C), C)
    return da, dz


@jit
def score_grads(code, root, da, delta, C: tl.constexpr):
    """The gradient of a tile of scores, given that of its code; `delta` is [head, query]."""
    if C.normalise == "softmax":
        da -= delta[:, :, None]
        da *= code
    else:
        if C.normalise == "rms_heads":
            da -= code * (tl.sum(code * da, 0) / C.q.heads)[None, :, :]
        da *= root
    return da


@jit
def load_sums(start, at, N: tl.constexpr, t, C: tl.constexpr):
    """[head, query] of a tensor (b t N h), in which `at` names sample, first query and row."""
    b, q0, row = at
    h = tl.arange(0, C.q.heads_padded)[:, None]
    i = q0 + tl.arange(0, C.q.rows)[None, :]
    return tl.load(start + ((b * t + i) * N + row) * C.q.heads + h, mask=(h < C.q.heads) & (i < t), other=0.0)


@jit
def store_sums(start, at, N: tl.constexpr, t, x, C: tl.constexpr):
    """The inverse of `load_sums`."""
    b, q0, row = at
    h = tl.arange(0, C.q.heads_padded)[:, None]
    i = q0 + tl.arange(0, C.q.rows)[None, :]
    tl.store(start + ((b * t + i) * N + row) * C.q.heads + h, x, mask=(h < C.q.heads) & (i < t))


@jit
def hyla_softmax(tensors, strides, t, s, settings, C: tl.constexpr):
    """The largest score of a query, and 1 / sum exp(score - that); both are 0 for a query without keys."""
    q, k, _v, bias = tensors
    scale, limits, softmax, _delta = settings
    tiles = tl.cdiv(t, C.sight.queries)
    q0 = tl.program_id(0) % tiles * C.sight.queries
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    call = (number(scale, C.dots.total), (t, s), limits, softmax)
    queries = load_by_head(q + b * strides[0][0], q0, t, strides[0], C.q)
    top = tl.full([C.q.heads_padded, C.q.rows], float("-inf"), C.dots.total)
    total = tl.full([C.q.heads_padded, C.q.rows], 0.0, C.dots.total)
    low, high = keys_of(q0, (t, s), limits, C.sight)
    for k0 in range(low, high, C.sight.keys):
        keys = load_by_head(k + b * strides[1][0], k0, s, strides[1], C.k)
        scores, seen = score_tile(queries, keys, bias, (b, q0, k0), call, C)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 2))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - finite) + tl.sum(tl.exp(scores - finite[:, :, None]), 2)
        top = higher
    nowhere = total == 0
    store_sums(softmax, (b, q0, 0), 2, t, tl.where(top == float("-inf"), 0.0, top), C)
    store_sums(softmax, (b, q0, 1), 2, t, tl.where(nowhere, 0.0, 1 / tl.where(nowhere, 1.0, total)), C)


@jit
def hyla_delta(tensors, strides, t, s, settings, C: tl.constexpr):
    """The sums over keys of the code times its gradient."""
    q, k, v, bias, dout = tensors
    to_q, to_k, to_v, to_out = strides
    scale, limits, softmax, delta = settings
    tiles = tl.cdiv(t, C.sight.queries)
    q0 = tl.program_id(0) % tiles * C.sight.queries
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    call = (number(scale, C.dots.total), (t, s), limits, softmax)
    queries = load_by_head(q + b * to_q[0], q0, t, to_q, C.q)
    grads = load_rows(dout + b * to_out[0], q0, t, to_out, C.out)
    total = tl.full([C.q.heads_padded, C.q.rows], 0.0, C.dots.total)
    low, high = keys_of(q0, (t, s), limits, C.sight)
    for k0 in range(low, high, C.sight.keys):
        keys = load_by_head(k + b * to_k[0], k0, s, to_k, C.k)
        values = load_rows(v + b * to_v[0], k0, s, to_v, C.v)
        code, _ = code_tile(queries, keys, bias, (b, q0, k0), call, C)
        da, _ = width_backward(code.to(keys.dtype), values, grads, C)
        total += tl.sum(code * da, 2)
    store_sums(delta, (b, q0, 0), 1, t, total, C)
