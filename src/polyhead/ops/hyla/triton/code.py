# mypy: disallow-untyped-defs=False
"""Kernels of HYLA: the code of a tile of pairs and its gradient, and the sums that a softmax over keys needs first.

    rms, identity   a = root s                          ds = root (da - a mean_h(a da)); the mean only for rms
    softmax         a = exp(s - lse)                    ds = a (da - delta)
                    lse = log sum_keys exp(s)           delta = sum_keys a da

`lse` and `delta` are (b t h).  Separate kernels compute them, because both are sums over keys.
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
    scale, lengths, limits, _lse = call
    scores = dot(queries, tl.permute(keys, (0, 2, 1)), C.dots) * scale
    if bias is not None:
        scores += by_offset(bias, q0, k0, lengths, C.sight, C.q).to(C.dots.total)
    seen = visible(b, q0, k0, lengths, limits, C.sight)[None, :, :]
    if bias is not None:
        seen = seen & (scores != float("-inf"))
    return tl.where(seen, scores, 0.0), seen


@jit
def code_tile(queries, keys, bias, at, call, C: tl.constexpr):
    """[head, query, key] code of a tile, and its factor `root` [head or 1, query, key], 0 at masked pairs."""
    b, q0, _k0 = at
    _scale, lengths, _limits, lse = call
    scores, seen = score_tile(queries, keys, bias, at, call, C)
    root = seen.to(C.dots.total)
    if C.normalise == "softmax":
        top = load_sums(lse, b, q0, lengths[0], C)[:, :, None]
        scores = tl.exp(tl.where(seen, scores - top, 0.0))
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
def width_backward(a, values, grads, C: tl.constexpr):
    """The gradients of a tile's codes and hidden layers [key, query, width], through a part of the width.

    Few heads become columns of a product: tensor cores need 8 columns, but 16 rows and terms.
    """
    dy = dot(terms(tl.permute(a, (1, 2, 0)), C.out.deep), grads[1], C.dots)
    dz = tl.permute(dy.to(a.dtype), (1, 0, 2))
    z = hidden_layer(a, values[1], C)
    y = z
    if C.relu:
        y = positive(z)
        dz = tl.where(z <= 0, tl.zeros_like(dz), dz)
    y = y.to(a.dtype)
    if C.v.deep.spread > 1:
        da = tl.permute(dot(dz, tl.permute(values[0], (0, 2, 1)), C.dots), (2, 1, 0))
        da += tl.permute(dot(tl.permute(y, (1, 0, 2)), tl.permute(grads[0], (0, 2, 1)), C.dots), (2, 0, 1))
    else:
        da = tl.permute(dot(grads[0], tl.permute(y, (1, 2, 0)), C.dots), (1, 0, 2))
        da += tl.permute(dot(values[0], tl.permute(dz, (0, 2, 1)), C.dots), (1, 2, 0))
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
def load_sums(start, b, q0, t, C: tl.constexpr):
    """[head, query] of a tensor (b t h)."""
    h = tl.arange(0, C.q.heads_padded)[:, None]
    i = q0 + tl.arange(0, C.q.rows)[None, :]
    return tl.load(start + (b * t + i) * C.q.heads + h, mask=(h < C.q.heads) & (i < t), other=0.0)


@jit
def store_sums(start, b, q0, t, x, C: tl.constexpr):
    """The inverse of `load_sums`."""
    h = tl.arange(0, C.q.heads_padded)[:, None]
    i = q0 + tl.arange(0, C.q.rows)[None, :]
    tl.store(start + (b * t + i) * C.q.heads + h, x, mask=(h < C.q.heads) & (i < t))


@jit
def hyla_lse(tensors, strides, t, s, settings, C: tl.constexpr):
    """The log-sum-exp of the scores over keys; 0 for a query without keys."""
    q, k, _v, bias = tensors
    scale, limits, lse, _delta = settings
    tiles = tl.cdiv(t, C.sight.queries)
    q0 = tl.program_id(0) % tiles * C.sight.queries
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    call = (number(scale, C.dots.total), (t, s), limits, lse)
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
    store_sums(lse, b, q0, t, tl.where(nowhere, 0.0, top + tl.log(tl.where(nowhere, 1.0, total))), C)


@jit
def hyla_delta(tensors, strides, t, s, settings, C: tl.constexpr):
    """The sums over keys of the code times its gradient."""
    q, k, v, bias, dout = tensors
    to_q, to_k, to_v, to_out = strides
    scale, limits, lse, delta = settings
    tiles = tl.cdiv(t, C.sight.queries)
    q0 = tl.program_id(0) % tiles * C.sight.queries
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    call = (number(scale, C.dots.total), (t, s), limits, lse)
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
    store_sums(delta, b, q0, t, total, C)
