"""HYLA in tiles: memory O(t) instead of O(t^2); the backward pass recomputes the code.

A tile has some queries i and keys j of all heads; a is its code, with dropout.

    forward    z_ij = sum_h a_hij v_jh            y = act(z)              out_ih += sum_j a_hij y_ij
    backward   dy_ij = sum_h a_hij dout_ih        dz = dy act'(z)         da_hij = dout_ih . y_ij + dz_ij . v_jh
               dv_jh += sum_i a_hij dz_ij         ds = da through the normaliser, then dq, dk and dbias as everywhere
    rms        a = c s,  c = (mean_h s^2 + eps)^(-1/2)                    ds = c (da - a mean_h(a da))
    softmax    ds = a (da - sum a da) over keys j (a tile of codes has whole rows, read in parts) or heads h

Only the arguments are saved.  The scores are normalised before they are multiplied by values, with statistics in at
least float32.  Taking the normaliser out of relu would save one product per pair, but at masked pairs it is infinite in
half precision.  tiles.py computes one tile.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6 and 10.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Gradients, Kernel, backward_only, custom_op
from polyhead.ops.hyla.tiles import HylaChunk, HylaGradients, backward_chunk, forward_chunk
from polyhead.ops.latent_code import share, wide
from polyhead.ops.tiles import Buffers, Scores, VisibleTiles
from polyhead.spec import SOFTMAX_AXIS

QUERIES, KEYS = 191, 48
"""The most queries and keys in one tile of values.

An odd number of queries avoids cache conflicts: with 192, one query's numbers for all keys map to the same cache set.
"""

PAIRS = 1 << 17
"""The most numbers in one tile of values of a chunk of the batch; a chunk has at least one sample."""

ROWS = 1 << 20
"""The most numbers in one tile of whole rows of codes; a tile has at least one row."""


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why tiles cannot take a call, or None.  They take all calls but those that need derivatives custom ops lack."""
    return backward_only(x)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference?

    Whole training steps of the fuzzy-logic model (`benchmarks/speed/training.py` with the impl named), one core: the
    reference takes 26 ms and tiles 31 at 2^16 pairs b t s (d = 8), 56 and 67 at 2^17 (d = 2).  Forward and backward
    of the op alone at 2^18 pairs, reference over tiles: 2.4 with rms over heads (causal), 1.0 with softmax.
    """
    t, s = x.lengths
    return x.q.shape[0] * t * s >= 1 << 18


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """HYLA in tiles, with gradients of q, k, v, bias and value_weight.

    If `twice`, the reference computes second derivatives; otherwise they raise RuntimeError.
    """
    return _op(x, twice)[0]


# ---------------------------------------------------------------------------------------------------- chunks of a call
def sizes(b: int, h: int, t: int, s: int, e: int, whole_rows: bool) -> tuple[int, int, int]:
    """(samples per chunk, queries per tile, keys per tile of values)."""
    most = max(1, min(QUERIES, ROWS // max(1, h * s)) if whole_rows else QUERIES)
    tile_t = -(-t // max(1, -(-t // most))) | 1
    tile_s = max(1, min(KEYS, s))
    return max(1, min(b, PAIRS // max(1, min(tile_t, t) * tile_s * max(h, e)))), tile_t, tile_s


def chunks(x: AttentionCall) -> Iterator[tuple[slice, HylaChunk]]:
    """Yield the batch in chunks whose tiles fit into the cache, each in the layout of its matrix products."""
    (b, t, h, _), s, e = x.q.shape, x.k.shape[1], x.v.shape[-1]
    stats = wide(x.q).dtype
    # CPUs multiply half precision no faster than float32, so they compute in the wider dtype.
    work = stats if x.q.device.type == "cpu" else x.q.dtype
    q, k, v = x.q.to(work), share(x.k.to(work), h), share(x.v.to(work), h)
    weight = None if x.value_weight is None else x.value_weight.to(work)
    reach = VisibleTiles(t, s, q.device, causal=x.causal, window=x.window, cu_seqlens=x.cu_seqlens)
    samples, tile_t, tile_s = sizes(b, h, t, s, e, SOFTMAX_AXIS.get(x.normalise) == "s")
    buffers = Buffers(q.device)
    for first in range(0, b, samples):
        part = slice(first, min(first + samples, b))
        bias, mask, keep = (_of_pairs(a, part, (b, h, t, s)) for a in (x.bias, x.mask, x.keep))
        queries, keys = _by_sample_and_head(q[part]), _by_sample_and_head(k[part])
        scores = Scores(queries, keys, h, x.factor, reach, bias, mask, keep, stats, buffers)
        values = v[part].transpose(0, 1).contiguous()
        yield part, HylaChunk(scores, values, weight, x.normalise, x.act, tile_t, tile_s)


def _by_sample_and_head(x: Tensor) -> Tensor:
    """(b t h d) as ((b h) t d)."""
    return x.transpose(1, 2).flatten(0, 1)


def _of_pairs(x: Tensor | None, part: slice, shape: tuple[int, int, int, int]) -> Tensor | None:
    """A bias, mask or keep of some samples, expanded without a copy; a bias by offset stays unchanged."""
    by_offset = x is None or (x.ndim == 2 and x.is_floating_point())
    return x if x is None or by_offset else x.expand(shape)[part]


def _forward(x: AttentionCall) -> list[Tensor]:
    out = x.q.new_empty(*x.q.shape[:3], x.v.shape[-1])
    for part, chunk in chunks(x):
        forward_chunk(chunk, out[part])
    return [out]


def _backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    (b, t, h, d), (s, groups), e = x.q.shape, x.k.shape[1:3], x.v.shape[-1]
    (dout,), wider = douts, wide(x.q).dtype
    dq, dk, dv = (x.q.new_zeros(size, dtype=wider) for size in ((b, h, t, d), (b, h, s, d), (b, s, h, e)))
    dbias, dweight = (None if a is None else torch.zeros_like(a, dtype=wider) for a in (x.bias, x.value_weight))
    for part, chunk in chunks(x):
        own = dbias if dbias is None or dbias.ndim == 2 or len(dbias) == 1 else dbias[part]
        rows = dq[part].view(chunk.scores.q.shape), dk[part].view(chunk.scores.k.shape)
        grads = HylaGradients(*rows, dq.new_zeros(chunk.v.shape), own, dweight)
        backward_chunk(chunk, dout[part].to(chunk.v.dtype), grads)
        dv[part] = grads.v.transpose(0, 1)
    dk, dv = (a.unflatten(2, (groups, -1)).sum(3) for a in (dk.transpose(1, 2), dv))
    found = {"q": dq.transpose(1, 2), "k": dk, "v": dv, "bias": dbias, "value_weight": dweight}
    return {name: grad for name, grad in found.items() if grad is not None}


_op = custom_op(Kernel("hyla", "blocked", _forward, _backward))
