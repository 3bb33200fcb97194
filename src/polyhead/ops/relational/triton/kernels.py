# mypy: disallow-untyped-defs=False
"""Kernels of relational attention.  A program owns a tile of queries or keys, with a part of the heads and relations.

Tiles are [head, own, other] and [relation, own, other].  A small product per query mixes heads with relations:

    related  [query, head, relation]  code [query, head, key] @ rel [query, key, relation]
    da      += [query, head, key]     drelated [query, head, relation] @ rel [query, relation, key]
    drel     = [query, relation, key] drelated^T [query, relation, head] @ code [query, head, key]

The last two sum over relations and heads, and tensor cores need at least 16 terms.  So rows are repeated, and all but
one of the repeated columns are zero; the other products then need no padding.

Symbols by offset: the code of a tile is skewed, so that column n holds offset n, and multiplied by the rows of these
offsets.  Their gradient is a kernel whose programs own offsets and walk along the diagonal.  The gradient of a bias by
offset is summed along diagonals per tile of queries, each in its own row.  This file imports triton, so it is imported
only where a kernel is about to run.
"""

import triton.language as tl

from polyhead.ops.relational.triton.activations import activate, slope
from polyhead.ops.triton_tiles import (
    by_offset,
    diagonals,
    dot,
    jit,
    keys_of,
    load_by_head,
    load_by_row,
    number,
    queries_of,
    store_by_head,
    store_by_row,
    visible,
)


# ------------------------------------------------------------------------------------------------- sums that are short
@jit
def repeated(x, N: tl.constexpr):
    """[i, n, j] as [i, N, j]: each row is repeated N / n times."""
    if x.shape[1] < N:
        x = tl.broadcast_to(tl.expand_dims(x, 2), (x.shape[0], x.shape[1], N // x.shape[1], x.shape[2]))
        x = tl.reshape(x, (x.shape[0], N, x.shape[3]))
    return x


@jit
def spread(x, N: tl.constexpr):
    """[i, j, n] as [i, j, N] with zeros in between: its product with `repeated` equals the product of the originals."""
    if x.shape[2] < N:
        each: tl.constexpr = N // x.shape[2]
        x = tl.broadcast_to(tl.expand_dims(x, 3), (x.shape[0], x.shape[1], x.shape[2], each))
        x = tl.reshape(x, (x.shape[0], x.shape[1], N))
        x = tl.where((tl.arange(0, N) % each == 0)[None, None, :], x, 0.0)
    return x


# ---------------------------------------------------------------------------------------------------- symbols by offset
@jit
def near(q0, k0, t, C: tl.constexpr):
    """The first offset (at least 0) of a tile of pairs; C.symbols has rows for all of its offsets."""
    return tl.maximum(k0 - (q0 + C.q.rows - 1) + t - 1, 0)


@jit
def skewed(code, shift, C: tl.constexpr):
    """Codes [head, query, key] as [head, query, column]: column n of query i holds key n + i + shift, or 0."""
    i = tl.arange(0, C.q.rows)[None, :, None]
    j = tl.arange(0, C.symbols.rows)[None, None, :] + i + shift
    at = tl.minimum(tl.maximum(j, 0), code.shape[2] - 1)
    code = tl.gather(code, tl.broadcast_to(at, (C.q.heads_padded, C.q.rows, C.symbols.rows)), 2)
    return tl.where((j >= 0) & (j <= at), code, 0.0)


@jit
def unskewed(x, shift, C: tl.constexpr):
    """The inverse of `skewed`: [head, own, other] of [head, query, column]; if keys own, of [head, column, query]."""
    i = tl.arange(0, C.q.rows)[None, :, None]
    at = tl.arange(0, C.k.rows)[None, None, :] - i - shift
    at = tl.broadcast_to(tl.minimum(tl.maximum(at, 0), C.symbols.rows - 1), (C.q.heads_padded, C.q.rows, C.k.rows))
    return tl.gather(x, tl.permute(at, (0, 2, 1)), 1) if C.own_keys else tl.gather(x, at, 2)


# ------------------------------------------------------------------------------------------------------------- a tile
@jit
def inner(x, y, C: tl.constexpr):
    """Inner products of rows: [head, own, other]."""
    return dot(x, tl.permute(y, (0, 2, 1)), C.dots)


@jit
def limited(scores, bias, at, lengths, limits, C: tl.constexpr):
    """Scores plus bias; -inf at hidden pairs."""
    b, q0, k0 = at
    seen = visible(b, q0, k0, lengths, limits, C.sight)[None, :, :]
    if bias is not None:
        added = by_offset(bias, q0, k0, lengths, C.sight, C.q).to(C.dots.total)
        scores += tl.permute(added, (0, 2, 1)) if C.own_keys else added
    if C.own_keys:
        seen = tl.permute(seen, (0, 2, 1))
    return tl.where(seen, scores, float("-inf"))


@jit
def statistic(start, q0, t, C: tl.constexpr):
    """[head, query] of a tensor (h t); 0 outside of it."""
    h = tl.arange(0, C.q.heads_padded)[:, None]
    i = q0 + tl.arange(0, C.q.rows)[None, :]
    return tl.load(start + h * t + i, mask=(h < C.q.heads) & (i < t), other=0.0)


@jit
def shares(start, b, q0, t, heads, C: tl.constexpr):
    """[head, query] of both rows of a tensor (b 2 h t): the largest score, and 1 / sum exp(score - that)."""
    start += b * 2 * heads * t
    return statistic(start, q0, t, C), statistic(start + heads * t, q0, t, C)


@jit
def weights(scores, softmax, C: tl.constexpr):
    """The softmax of a tile of scores; the log-sum-exp in place of `softmax` would be rounded as much as a score."""
    axis: tl.constexpr = 1 if C.own_keys else 2
    return tl.exp(scores - tl.expand_dims(softmax[0], axis)) * tl.expand_dims(softmax[1], axis)


@jit
def values_of(symbols, stride, at, lengths, C: tl.constexpr):
    """[head, key or offset, width]."""
    b, q0, k0 = at
    t, s = lengths
    row = near(q0, k0, t, C) if C.by_offset else k0
    end = t + s - 1 if C.by_offset else s
    return load_by_head(symbols + b * stride[0], row, end, stride, C.symbols)


@jit
def read(code, symbols, stride, at, lengths, C: tl.constexpr):
    """[head, query, width]: the sums of symbols weighted by codes [head, query, key]."""
    _b, q0, k0 = at
    values = values_of(symbols, stride, at, lengths, C)
    if C.by_offset:
        code = skewed(code, near(q0, k0, lengths[0], C) - (lengths[0] - 1) + q0 - k0, C)
    return dot(code.to(values.dtype), values, C.dots)


@jit
def query_side(tensors, strides, b, q0, t, C: tl.constexpr):
    """Tiles of q, q_rel, the gradients of both outputs (that of `related` per query), the softmax's sums and delta."""
    q, q_rel, dretrieved, drelated, softmax, delta = tensors
    stride, rel_stride, read_stride, related_stride, heads = strides
    return (
        load_by_head(q + b * stride[0], q0, t, stride, C.q),
        load_by_head(q_rel + b * rel_stride[0], q0, t, rel_stride, C.q_rel),
        load_by_head(dretrieved + b * read_stride[0], q0, t, read_stride, C.read),
        load_by_row(drelated + b * related_stride[0], q0, t, related_stride, C.related),
        shares(softmax, b, q0, t, heads, C),
        statistic(delta + b * heads * t, q0, t, C),
    )


@jit
def key_side(tensors, strides, b, k0, s, C: tl.constexpr):
    """Tiles of k and k_rel."""
    k, k_rel = tensors
    stride, rel_stride = strides
    return (
        load_by_head(k + b * stride[0], k0, s, stride, C.k),
        load_by_head(k_rel + b * rel_stride[0], k0, s, rel_stride, C.k_rel),
    )


@jit
def attended(query_values, values, at, t, C: tl.constexpr):
    """[head, own, other]: the part of the codes' gradient that comes through the symbols."""
    _b, q0, k0 = at
    x = inner(values, query_values, C) if C.own_keys else inner(query_values, values, C)
    return unskewed(x, near(q0, k0, t, C) - (t - 1) + q0 - k0, C) if C.by_offset else x


@jit
def store_diagonals(start, at, lengths, sums, C: tl.constexpr):
    """Write sums [head, column] over one tile of queries; column 0 belongs to the tile's last query and first key."""
    q0, k0 = at
    t, s = lengths
    h = tl.arange(0, C.q.heads_padded)[:, None]
    n = k0 - (q0 + C.q.rows - 1) + t - 1 + tl.arange(0, C.k.rows)[None, :]
    tl.store(start + h * (t + s - 1) + n, sums, mask=(h < C.q.heads) & (n >= 0) & (n < t + s - 1))


@jit
def per_query(x, C: tl.constexpr):
    """[n, own, other] as [query, n, key]."""
    return tl.permute(x, (2, 0, 1)) if C.own_keys else tl.permute(x, (1, 0, 2))


@jit
def per_head(x, C: tl.constexpr):
    """[query, n, key] as [n, own, other]."""
    return tl.permute(x, (1, 2, 0)) if C.own_keys else tl.permute(x, (1, 0, 2))


@jit
def pairs(p, da, u, drelated, delta, C: tl.constexpr):
    """Gradients of scores and of relations before their activation, given the part `da` through the symbols."""
    dtype: tl.constexpr = drelated.dtype
    rel = repeated(per_query(activate(u, C).to(dtype), C), C.deep_relations)
    da += per_head(dot(spread(drelated, C.deep_relations), rel, C.dots), C)
    if C.reads:  # only one part of the relations handles the normaliser
        da -= tl.expand_dims(delta, 1 if C.own_keys else 2)
    code = repeated(per_query(p.to(dtype), C), C.deep_heads)
    du = per_head(dot(spread(tl.permute(drelated, (0, 2, 1)), C.deep_heads), code, C.dots), C)
    return p * da, slope(du, u, C)


# -------------------------------------------------------------------------------------------------------------- kernels
@jit
def forward(tensors, strides, t, s, settings, C: tl.constexpr):
    """Both outputs and the softmax's sums of a tile of queries; grid axis 1 divides the keys by `share` unless None."""
    q, q_rel, keys, symbols, bias, retrieved, related, softmax = tensors
    q_stride, q_rel_stride, key_strides, symbols_stride, read_stride, related_stride, heads = strides
    scale, rel_scale, limits, share = settings
    tiles = tl.cdiv(t, C.q.rows)
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    to = b + tl.program_id(1) * (tl.num_programs(0) // tiles)
    q0 = (tiles - 1 - tl.program_id(0) % tiles) * C.q.rows  # tiles with most visible keys first
    own = load_by_head(q + b * q_stride[0], q0, t, q_stride, C.q)
    own_rel = load_by_head(q_rel + b * q_rel_stride[0], q0, t, q_rel_stride, C.q_rel)
    top = tl.full((C.q.heads_padded, C.q.rows), float("-inf"), C.dots.total)
    total = tl.full((C.q.heads_padded, C.q.rows), 0, C.dots.total)
    sum_read = tl.full((C.q.heads_padded, C.q.rows, C.read.width_padded), 0, C.dots.total)
    sum_related = tl.full((C.q.rows, C.q.heads_padded, C.related.width_padded), 0, C.dots.total)
    low, high = keys_of(q0, (t, s), limits, C.sight)
    if share is not None:
        low = tl.maximum(low, tl.program_id(1) * share)
        high = tl.minimum(high, (tl.program_id(1) + 1) * share)
    for k0 in range(low, high, C.k.rows):
        k, k_rel = key_side(keys, key_strides, b, k0, s, C)
        scores = inner(own, k, C) * number(scale, C.dots.total)
        scores = limited(scores, bias, (b, q0, k0), (t, s), limits, C)
        new = tl.maximum(top, tl.max(scores, 2))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(scores - base[:, :, None])
        less = tl.exp(top - base)
        top = new
        total = total * less + tl.sum(p, 2)
        if C.reads:
            found = read(p, symbols, symbols_stride, (b, q0, k0), (t, s), C)
            sum_read = sum_read * less[:, :, None] + found
        rel = activate(inner(own_rel, k_rel, C) * number(rel_scale, C.dots.total), C).to(k.dtype)
        found = dot(per_query(p.to(k.dtype), C), tl.permute(rel, (1, 2, 0)), C.dots)
        sum_related = sum_related * tl.permute(less, (1, 0))[:, :, None] + found
    nowhere = total == 0
    over = tl.where(nowhere, 0.0, 1 / tl.where(nowhere, 1.0, total))
    sum_related = sum_related * tl.permute(over, (1, 0))[:, :, None]
    store_by_row(related + to * related_stride[0], q0, t, related_stride, sum_related, C.related)
    if C.reads:
        store_by_head(retrieved + to * read_stride[0], q0, t, read_stride, sum_read * over[:, :, None], C.read)
        h = tl.arange(0, C.q.heads_padded)[:, None]
        i = q0 + tl.arange(0, C.q.rows)[None, :]
        at = softmax + to * 2 * heads * t + h * t + i
        tl.store(at, tl.where(top == float("-inf"), 0.0, top), mask=(h < C.q.heads) & (i < t))
        tl.store(at + heads * t, over, mask=(h < C.q.heads) & (i < t))


@jit
def backward_queries(tensors, strides, t, s, settings, C: tl.constexpr):
    """The gradients of a tile of q and q_rel, and the tile's sums along diagonals for the gradient of the bias."""
    queries, keys, symbols, bias, dq, dq_rel, dbias = tensors
    query_strides, key_strides, symbols_stride, dq_stride, dq_rel_stride, heads = strides
    scale, rel_scale, limits = settings
    tiles = tl.cdiv(t, C.q.rows)
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles
    q0 = tile * C.q.rows
    row = (b * tiles + tile) * heads * (t + s - 1)
    q, q_rel, dretrieved, drelated, softmax, delta = query_side(queries, query_strides, b, q0, t, C)
    scale = number(scale, C.dots.total)
    rel_scale = number(rel_scale, C.dots.total)
    sum_q = tl.full((C.q.heads_padded, C.q.rows, C.q.width_padded), 0, C.dots.total)
    sum_rel = tl.full((C.q_rel.heads_padded, C.q.rows, C.q_rel.width_padded), 0, C.dots.total)
    carried = tl.full((C.q.heads_padded, C.k.rows), 0, C.dots.total)
    low, high = keys_of(q0, (t, s), limits, C.sight)
    for k0 in range(low, high, C.k.rows):
        k, k_rel = key_side(keys, key_strides, b, k0, s, C)
        scores = limited(inner(q, k, C) * scale, bias, (b, q0, k0), (t, s), limits, C)
        p = weights(scores, softmax, C)
        if C.reads:
            values = values_of(symbols, symbols_stride, (b, q0, k0), (t, s), C)
            da = attended(dretrieved, values, (b, q0, k0), t, C)
        else:
            da = tl.full((C.q.heads_padded, C.q.rows, C.k.rows), 0, C.dots.total)
        ds, du = pairs(p, da, inner(q_rel, k_rel, C) * rel_scale, drelated, delta, C)
        sum_q += dot(ds.to(k.dtype), k, C.dots)
        sum_rel += dot(du.to(k.dtype), k_rel, C.dots)
        if dbias is not None:
            store_diagonals(dbias + row, (q0, k0), (t, s), carried + diagonals(ds, 0), C)
            carried = diagonals(ds, 1)
    if dbias is not None:
        end = low + tl.maximum(0, tl.cdiv(high - low, C.k.rows)) * C.k.rows
        store_diagonals(dbias + row, (q0, end), (t, s), carried, C)
    store_by_head(dq + b * dq_stride[0], q0, t, dq_stride, sum_q * scale, C.q)
    store_by_head(dq_rel + b * dq_rel_stride[0], q0, t, dq_rel_stride, sum_rel * rel_scale, C.q_rel)


@jit
def backward_keys(tensors, strides, t, s, settings, C: tl.constexpr):
    """The gradients of a tile of k, k_rel and symbols by key, for every query head."""
    queries, keys, symbols, bias, dk, dk_rel, dsymbols = tensors
    query_strides, key_strides, symbols_stride, dk_stride, dk_rel_stride, dsymbols_stride = strides
    scale, rel_scale, limits = settings
    tiles = tl.cdiv(s, C.k.rows)
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    k0 = tl.program_id(0) % tiles * C.k.rows
    k, k_rel = key_side(keys, key_strides, b, k0, s, C)
    scale = number(scale, C.dots.total)
    rel_scale = number(rel_scale, C.dots.total)
    sum_k = tl.full((C.k.heads_padded, C.k.rows, C.k.width_padded), 0, C.dots.total)
    sum_rel = tl.full((C.k_rel.heads_padded, C.k.rows, C.k_rel.width_padded), 0, C.dots.total)
    sum_symbols = tl.full((C.k.heads_padded, C.k.rows, C.symbols.width_padded), 0, C.dots.total)
    if C.reads and not C.by_offset:
        values = values_of(symbols, symbols_stride, (b, 0, k0), (t, s), C)
    low, high = queries_of(k0, (t, s), limits, C.sight)
    for q0 in range(low, high, C.q.rows):
        q, q_rel, dretrieved, drelated, softmax, delta = query_side(queries, query_strides, b, q0, t, C)
        scores = limited(inner(k, q, C) * scale, bias, (b, q0, k0), (t, s), limits, C)
        p = weights(scores, softmax, C)
        if C.by_offset:
            values = values_of(symbols, symbols_stride, (b, q0, k0), (t, s), C)
        elif C.reads:
            sum_symbols += dot(p.to(k.dtype), dretrieved, C.dots)
        if C.reads:
            da = attended(dretrieved, values, (b, q0, k0), t, C)
        else:
            da = tl.full((C.k.heads_padded, C.k.rows, C.q.rows), 0, C.dots.total)
        ds, du = pairs(p, da, inner(k_rel, q_rel, C) * rel_scale, drelated, delta, C)
        sum_k += dot(ds.to(k.dtype), q, C.dots)
        sum_rel += dot(du.to(k.dtype), q_rel, C.dots)
    store_by_head(dk + b * dk_stride[0], k0, s, dk_stride, sum_k * scale, C.k)
    store_by_head(dk_rel + b * dk_rel_stride[0], k0, s, dk_rel_stride, sum_rel * rel_scale, C.k_rel)
    if C.reads and not C.by_offset:
        store_by_head(dsymbols + b * dsymbols_stride[0], k0, s, dsymbols_stride, sum_symbols, C.symbols)


@jit
def backward_offsets(tensors, strides, t, s, settings, C: tl.constexpr):
    """The gradient of a tile of symbols by offset, per sample and query head; C.k spans the diagonal."""
    q, k, bias, dretrieved, softmax, dsymbols = tensors
    q_stride, k_stride, read_stride, heads, dsymbols_stride = strides
    scale, limits = settings
    _, _, _, _, window = limits
    tiles = tl.cdiv(t + s - 1, C.symbols.rows)
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    n0 = tl.program_id(0) % tiles * C.symbols.rows
    low = tl.maximum(0, t - n0 - C.symbols.rows)
    high = tl.minimum(t, t + s - 1 - n0)
    if C.sight.causal:
        high = tl.where(n0 < s, high, low)
    if window is not None:
        high = tl.where((n0 + C.symbols.rows > s - window) & (n0 < s - 1 + window), high, low)
    sums = tl.full((C.q.heads_padded, C.symbols.rows, C.symbols.width_padded), 0, C.dots.total)
    for q0 in range(low, high, C.q.rows):
        k0 = tl.maximum(q0 + n0 - (t - 1), 0)
        own = load_by_head(q + b * q_stride[0], q0, t, q_stride, C.q)
        other = load_by_head(k + b * k_stride[0], k0, s, k_stride, C.k)
        dread = load_by_head(dretrieved + b * read_stride[0], q0, t, read_stride, C.read)
        scores = inner(own, other, C) * number(scale, C.dots.total)
        scores = limited(scores, bias, (b, q0, k0), (t, s), limits, C)
        p = weights(scores, shares(softmax, b, q0, t, heads, C), C)
        code = skewed(p, n0 - (t - 1) + q0 - k0, C).to(dread.dtype)
        sums += dot(tl.permute(code, (0, 2, 1)), dread, C.dots)
    store_by_head(dsymbols + b * dsymbols_stride[0], n0, t + s - 1, dsymbols_stride, sums, C.symbols)
