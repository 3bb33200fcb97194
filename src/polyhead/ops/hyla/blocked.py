"""HYLA in tiles: memory O(t) instead of O(t^2); the backward pass recomputes the code.

A tile has some queries i and keys j of all heads; a is its code, with dropout.

    forward    z_ij = sum_h a_hij v_jh            y = act(z)              out_ih += sum_j a_hij y_ij
    backward   dy_ij = sum_h a_hij dout_ih        dz = dy act'(z)         da_hij = dout_ih . y_ij + dz_ij . v_jh
               dv_jh += sum_i a_hij dz_ij         ds = da through the normaliser, then dq, dk and dbias as everywhere
    rms        a = c s,  c = (mean_h s^2 + eps)^(-1/2)                    ds = c (da - a mean_h(a da))
    softmax    ds = a (da - sum a da) over keys j (a tile of codes has whole rows, read in parts) or heads h

Only the arguments are saved.  The scores are normalised before they are multiplied by values, with statistics in at
least float32.  These tiles are twice as fast as those that tiling.py derives from the reference; a deep value network
goes through those.  tiles.py computes one tile.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6 and 10.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.reference import reference
from polyhead.ops.hyla.tiles import Buffers, HylaChunk, HylaGradients, Scores, backward_chunk, forward_chunk
from polyhead.ops.kernel import Gradients, Outputs, empty_output
from polyhead.ops.latent_code import share, wide
from polyhead.ops.tiles import VisibleTiles
from polyhead.ops.tiling import gradients_by_tiles, outputs_by_tiles
from polyhead.spec import SOFTMAX_AXIS

QUERIES, KEYS = 191, 48
"""The most queries and keys in one tile of values.

An odd number of queries avoids cache conflicts: with 192, one query's numbers for all keys map to the same cache set.
"""

PAIRS = 1 << 17
"""The most numbers in one tile of values of a chunk of the batch; a chunk has at least one sample."""

ROWS = 1 << 20
"""The most numbers in one tile of whole rows of codes; a tile has at least one row."""

MIN_PAIRS = 1 << 18
"""Pairs b t s from which on tiles are no slower than the reference."""


def recompute(call: AttentionCall) -> Outputs:
    """The output by PyTorch's own operations."""
    return [reference(call)]


def is_preferred(call: AttentionCall) -> bool:
    """Whether tiles were measured to be no slower than the reference."""
    t, s = call.lengths
    return call.q.shape[0] * t * s >= MIN_PAIRS


def tile_sizes(b: int, h: int, t: int, s: int, e: int, needs_whole_rows: bool) -> tuple[int, int, int]:
    """(samples per chunk, queries per tile, keys per tile of values)."""
    max_queries = QUERIES
    if needs_whole_rows:
        max_queries = max(1, min(QUERIES, ROWS // max(1, h * s)))
    num_tiles = max(1, -(-t // max_queries))
    tile_t = -(-t // num_tiles) | 1  # odd
    tile_s = max(1, min(KEYS, s))
    samples = max(1, min(b, PAIRS // max(1, min(tile_t, t) * tile_s * max(h, e))))
    return samples, tile_t, tile_s


def chunks(call: AttentionCall) -> Iterator[tuple[slice, HylaChunk]]:
    """Yield the batch in chunks whose tiles fit into the cache, each in the layout of its matrix products."""
    (b, t, h, _), s, e = call.q.shape, call.k.shape[1], call.v.shape[-1]
    wide_dtype = wide(call.q).dtype
    # CPUs multiply half precision no faster than float32, so they compute in the wider dtype.
    dtype = wide_dtype if call.q.device.type == "cpu" else call.q.dtype
    q, k, v = call.q.to(dtype), share(call.k.to(dtype), h), share(call.v.to(dtype), h)
    ranges = VisibleTiles(call.masks, t, s, q.device)
    num_samples, tile_t, tile_s = tile_sizes(b, h, t, s, e, SOFTMAX_AXIS.get(call.normalise) == "s")
    buffers = Buffers(q.device)
    for first in range(0, b, num_samples):
        samples = slice(first, min(first + num_samples, b))
        scores = Scores(
            q=_by_sample_and_head(q[samples]),
            k=_by_sample_and_head(k[samples]),
            heads=h,
            scale=call.score_scale,
            ranges=ranges,
            bias=_of_samples(call.bias, samples, (b, h, t, s)),
            mask=_of_samples(call.mask, samples, (b, h, t, s)),
            keep=_of_samples(call.keep, samples, (b, h, t, s)),
            wide_dtype=wide_dtype,
            buffers=buffers,
        )
        values = v[samples].transpose(0, 1).contiguous()
        yield samples, HylaChunk(scores, values, call.normalise, call.act, tile_t, tile_s)


def _by_sample_and_head(x: Tensor) -> Tensor:
    """(b t h d) as ((b h) t d)."""
    return x.transpose(1, 2).flatten(0, 1)


def _of_samples(x: Tensor | None, samples: slice, shape: tuple[int, int, int, int]) -> Tensor | None:
    """A bias, mask or keep of some samples, expanded without a copy; a bias by offset stays unchanged."""
    if x is None or (x.ndim == 2 and x.is_floating_point()):
        return x
    return x.expand(shape)[samples]


def forward_pass(call: AttentionCall) -> Outputs:
    """The output (b t h e)."""
    (out,) = empty_output(call)
    if call.value_weight is not None:
        return outputs_by_tiles(recompute, call, [out])
    for samples, chunk in chunks(call):
        forward_chunk(chunk, out[samples])
    return [out]


def backward_pass(call: AttentionCall, grad_outputs: Outputs) -> Gradients:
    """The gradients of q, k, v and, if given, bias and value_weight, from that of the output."""
    if call.value_weight is not None:
        return gradients_by_tiles(recompute, call, grad_outputs)
    (b, t, h, d), (s, groups), e = call.q.shape, call.k.shape[1:3], call.v.shape[-1]
    (dout,), wide_dtype = grad_outputs, wide(call.q).dtype
    dq = call.q.new_zeros((b, h, t, d), dtype=wide_dtype)
    dk = call.q.new_zeros((b, h, s, d), dtype=wide_dtype)
    dv = call.q.new_zeros((b, s, h, e), dtype=wide_dtype)
    dbias = None if call.bias is None else torch.zeros_like(call.bias, dtype=wide_dtype)

    for samples, chunk in chunks(call):
        dbias_part = dbias
        if dbias is not None and dbias.ndim == 4 and len(dbias) > 1:
            dbias_part = dbias[samples]
        grads = HylaGradients(
            q=dq[samples].view(chunk.scores.q.shape),
            k=dk[samples].view(chunk.scores.k.shape),
            v=dq.new_zeros(chunk.v.shape),
            bias=dbias_part,
        )
        backward_chunk(chunk, dout[samples].to(chunk.v.dtype), grads)
        dv[samples] = grads.v.transpose(0, 1)

    # Query heads that share a group of keys add up.
    gradients = {
        "q": dq.transpose(1, 2),
        "k": dk.transpose(1, 2).unflatten(2, (groups, -1)).sum(3),
        "v": dv.unflatten(2, (groups, -1)).sum(3),
    }
    if dbias is not None:
        gradients["bias"] = dbias
    return gradients
