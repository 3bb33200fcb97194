# mypy: disallow-untyped-defs=False
"""The kernels of HYLA's gradients: that of queries and bias, and that of keys and values (equations in __init__.py)."""

import triton.language as tl

from polyhead.ops.hyla.triton.code import (
    code_tile,
    from_keys,
    from_queries,
    hidden_backward,
    load_rows,
    score_grads,
    through_hidden,
    through_output,
    width_backward,
)
from polyhead.ops.hyla.triton.tiles import (
    diagonals,
    dot,
    jit,
    keys_of,
    load_by_head,
    number,
    queries_of,
    store_by_head,
    store_by_row,
)


@jit
def hyla_queries(tensors, strides, t, s, settings, C: tl.constexpr):
    """The gradient of a tile of queries, and its part of the gradient of the bias, in its own row of partial sums."""
    q, k, v, bias, dout, dq = tensors
    to_q, to_k, to_v, to_out, to_dq = strides
    scale, limits, first, rows, partial = settings
    tiles = rows // C.sight.queries
    q0 = first + (tiles - 1 - tl.program_id(0) % tiles) * C.sight.queries
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    call = (number(scale, C.dots.total), (t, s), limits)
    queries = load_by_head(q + b * to_q[0], q0, t, to_q, C.q)
    grads = load_rows(dout + b * to_out[0], q0, t, to_out, C.out)
    total = tl.full([C.q.heads_padded, C.q.rows, C.q.width_padded], 0.0, C.dots.total)
    low, high = keys_of(q0, (t, s), limits, C.sight)
    # Columns of the bias: neighbouring tiles of keys overlap.  A tile stores its finished columns and carries the rest.
    carry = tl.full([C.q.heads_padded, C.sight.keys], 0.0, C.dots.total)
    if bias is not None:
        h = tl.arange(0, C.q.heads_padded)[:, None]
        n = t + s - 1
        column = low - q0 + t - C.sight.queries + tl.arange(0, C.sight.keys)[None, :]
        row = partial + tl.cast(tl.program_id(0), tl.int64) * C.q.heads * n + h * n
    for k0 in range(low, high, C.sight.keys):
        keys = load_by_head(k + b * to_k[0], k0, s, to_k, C.k)
        values = load_rows(v + b * to_v[0], k0, s, to_v, C.v)
        code, root = code_tile(queries, keys, bias, (b, q0, k0), call, C)
        da, _ = width_backward(code.to(keys.dtype), values, grads, C)
        ds = score_grads(code, root, da, C)
        total += dot(ds.to(keys.dtype), keys, C.dots)
        if bias is not None:
            at = column + (k0 - low)
            tl.store(row + at, carry + diagonals(ds, 0), mask=(h < C.q.heads) & (at >= 0) & (at < n))
            carry = diagonals(ds, 1)
    if bias is not None:
        at = column + tl.cdiv(tl.maximum(high - low, 0), C.sight.keys) * C.sight.keys
        tl.store(row + at, carry, mask=(h < C.q.heads) & (at >= 0) & (at < n))
    store_by_head(dq + b * to_dq[0], q0, t, to_dq, total * call[0], C.q)


@jit
def hyla_keys(tensors, strides, t, s, settings, C: tl.constexpr):
    """The gradients of a tile of keys and of its values, for every query head."""
    q, k, v, bias, dout, dk, dv = tensors
    to_q, to_k, to_v, to_out, to_dk, to_dv = strides
    scale, limits = settings
    tiles = tl.cdiv(s, C.sight.keys)
    k0 = tl.program_id(0) % tiles * C.sight.keys
    b = tl.cast(tl.program_id(0) // tiles, tl.int64)
    call = (number(scale, C.dots.total), (t, s), limits)
    keys = load_by_head(k + b * to_k[0], k0, s, to_k, C.k)
    values = load_rows(v + b * to_v[0], k0, s, to_v, C.v)
    total_k = tl.full([C.k.heads_padded, C.k.rows, C.k.width_padded], 0.0, C.dots.total)
    total_v = tl.full([C.v.tile.rows, C.v.tile.width_padded, C.v.tile.heads_padded], 0.0, C.dots.total)
    more_v = total_v
    if C.halves:
        more_values = load_rows(v + b * to_v[0], k0, s, to_v, C.more_v)
    low, high = queries_of(k0, (t, s), limits, C.sight)
    for q0 in range(low, high, C.sight.queries):
        queries = load_by_head(q + b * to_q[0], q0, t, to_q, C.q)
        code, root = code_tile(queries, keys, bias, (b, q0, k0), call, C)
        a = code.to(keys.dtype)
        grads = load_rows(dout + b * to_out[0], q0, t, to_out, C.out)
        if C.halves:  # the products add up both halves, before their sums are laid out anew
            y, dz = hidden_backward(a, values, grads, C)
            by_key = through_hidden(dz, values, C)
            by_query = through_output(y, grads, C)
            total_v += dot(tl.permute(dz, (0, 2, 1)), tl.permute(a, (2, 1, 0)), C.dots)
            grads = load_rows(dout + b * to_out[0], q0, t, to_out, C.more_out)
            y, dz = hidden_backward(a, more_values, grads, C)
            more_by_key = through_hidden(dz, more_values, C)
            more_by_query = through_output(y, grads, C)
            by_key = more_by_key + by_key
            by_query = more_by_query + by_query
            more_v += dot(tl.permute(dz, (0, 2, 1)), tl.permute(a, (2, 1, 0)), C.dots)
            da = from_keys(by_key, C) + from_queries(by_query, C)
        else:
            da, dz = width_backward(a, values, grads, C)
            total_v += dot(tl.permute(dz, (0, 2, 1)), tl.permute(a, (2, 1, 0)), C.dots)
        ds = score_grads(code, root, da, C)
        total_k += dot(tl.permute(ds.to(queries.dtype), (0, 2, 1)), queries, C.dots)
    store_by_head(dk + b * to_dk[0], k0, s, to_dk, total_k * call[0], C.k)
    store_by_row(dv + b * to_dv[0], k0, s, to_dv, tl.permute(total_v, (0, 2, 1)), C.v.tile)
    if C.halves:
        store_by_row(dv + b * to_dv[0], k0, s, to_dv, tl.permute(more_v, (0, 2, 1)), C.more_v.tile)
