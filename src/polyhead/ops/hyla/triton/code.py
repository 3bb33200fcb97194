# mypy: disallow-untyped-defs=False
"""Parts of HYLA's kernels: the code of a tile of pairs, its gradient, and the value networks.

rms, identity   a = root s                          ds = root (da - a mean_h(a da)); the mean only for rms
"""

from dataclasses import dataclass

import triton.language as tl

from polyhead.ops.hyla.triton.tiles import (
    Block,
    CompiledIn,
    Dots,
    Sight,
    by_offset,
    dot,
    jit,
    load_by_row,
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
    scale, lengths, limits = call
    added = 0.0
    if bias is not None:
        added = by_offset(bias, q0, k0, lengths, C.sight, C.q).to(C.dots.total)
    scores = tl.fma(dot(queries, tl.permute(keys, (0, 2, 1)), C.dots), scale, added)
    is_visible = visible(b, q0, k0, lengths, limits, C.sight)[None, :, :]
    if bias is not None:
        is_visible = is_visible & (added != float("-inf"))
    return tl.where(is_visible, scores, 0.0), is_visible


@jit
def code_tile(queries, keys, bias, at, call, C: tl.constexpr):
    """[head, query, key] code of a tile, and its factor `root` [head or 1, query, key], 0 at masked pairs."""
    scores, is_visible = score_tile(queries, keys, bias, at, call, C)
    root = is_visible.to(C.dots.total)
    if C.normalise == "rms_heads":
        root = rms_root(scores, is_visible, C.q.heads, C.eps)
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
    """The gradient of a tile's codes through its output layers, by query; `through_hidden` has the other part."""
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
def score_grads(code, root, da, C: tl.constexpr):
    """The gradient of a tile of scores, given that of its code."""
    if C.normalise == "rms_heads":
        da -= code * (tl.sum(code * da, 0) / C.q.heads)[None, :, :]
    return da * root
