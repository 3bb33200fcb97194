"""Any op in tiles, derived from its reference: memory O(t) instead of O(t^2), and exact gradients.

The output of a mechanism is a sum over keys, so a tile of queries i and keys j is a small call of the reference:

    out_i       = sum over tiles of reference(q_i, k_j, v_j, bias_ij, ...)
    gradients   = sum over tiles of those of the reference, given dout_i

If keys are normalised or pooled in another way, a tile has all keys that its queries may attend to; otherwise a part
of them.
Only the arguments are saved; the backward pass recomputes each tile.  Sums are in at least float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Gradients, Kernel, Outputs, backward_only, custom_op, learned, like_values
from polyhead.ops.latent_code import wide
from polyhead.ops.tiles import Tile, VisibleTiles
from polyhead.spec import SOFTMAX_AXIS

QUERIES, KEYS = 128, 256
"""The most queries in a tile, and the most keys if it does not need all of them."""

NUMBERS = 1 << 23
"""The most numbers in the largest intermediate of a tile; a tile has at least one query."""

CUT = {
    "q": "bthd",
    "k": "bsgd",
    "v": "bsge",
    "q_rel": "btrp",
    "k_rel": "bsrp",
    "bias": "bhts",
    "mask": "bhts",
    "keep": "bhts",
    "out": "bthe",
}
"""Axes of the tensors that are cut into tiles; an axis of size 1 is shared by all tiles."""

BY_OFFSET = {("bias", 2): "hn", ("v", 3): "nge"}

OUTSIDE = torch._C._dispatch_tls_local_exclude_set()
"""Dispatch keys excluded at top level.  A compiled graph runs our op with autograd excluded; the backward pass of a
tile restores these keys."""


class Blocked:
    """The impl "blocked" of an op.  `op` is its folder, `name` the name of the custom op."""

    def __init__(self, op: str, name: str = "blocked") -> None:
        self._kernel = Kernel(op, name, self._forward, self._backward)
        self._op = custom_op(self._kernel)

    def unsupported_reason(self, x: AttentionCall) -> str | None:
        """Why tiles cannot take a call, or None.  They take all calls but those that need derivatives custom ops
        lack."""
        return backward_only(x)

    def preferred(self, x: AttentionCall) -> bool:
        """Is it measured to be no slower than the reference?

        Forward and backward, CPU time of tiles over that of the reference (one core, b 1, h 8, d 64, softmax,
        disentangled and pointwise Abstractor).  Causal: 0.7 to 1.2 at t = 512, 0.5 to 0.6 at 1024 and 2048.  Full: 1.2
        to 1.4 at 512, 1.0 to 1.2 at 1024, 1.2 to 1.3 at 2048.  Full attention uses tiles only to save memory, from
        2^26 pairs b t s on: there each (b h t s) tensor of the reference takes 2 GB.

        Pooled heads (d 16 and 64): with a network for each pair 1.7 to 2.3 at t = 128, 0.5 to 0.8 at 256, 0.3 to 1.0 at
        512; with one for each query 1.3 to 1.7 at 256, at 512 causal 0.8 to 0.9 and full 1.3 to 1.5.
        """
        pairs = x.q.shape[0] * x.q.shape[1] * x.k.shape[1]
        if x.network:
            numbers = pairs * x.v.shape[-1] * (x.q.shape[2] if x.network == "pair" else 1)
            return numbers >= 1 << (23 if x.network == "pair" else 22 if x.causal else 29)
        return pairs >= (1 << 20 if x.causal else 1 << 26)

    def forward(self, x: AttentionCall, twice: bool = False) -> Tensor:
        """The op in tiles.  If `twice`, the reference computes second derivatives; otherwise they raise
        RuntimeError."""
        return self._op(x, twice)[0]

    def _forward(self, x: AttentionCall) -> Outputs:
        return outputs_by_tiles(self._kernel.anew, x, like_values(x))

    def _backward(self, x: AttentionCall, douts: Outputs) -> Gradients:
        return gradients_by_tiles(self._kernel.anew, x, douts)


def outputs_by_tiles(plain: Callable[[AttentionCall], Outputs], x: AttentionCall, like: Outputs) -> Outputs:
    """The outputs of `plain`, tile by tile, shaped as `like` (b t h _).  Outputs that `plain` does not give are 0."""
    totals = [torch.zeros_like(out, dtype=wide(out).dtype) for out in like]
    with torch.no_grad():
        for part, at, limits in _tiles(x):
            own = {name: _work(_cut(name, a, part, at, x)) for name, a in learned(x).items()}
            for total, out in zip(totals, plain(limits.of(own)), strict=False):
                _cut("out", total, part, at, x).add_(out)
    return [total.to(out.dtype) for total, out in zip(totals, like, strict=True)]


def gradients_by_tiles(plain: Callable[[AttentionCall], Outputs], x: AttentionCall, douts: Outputs) -> Gradients:
    """Gradients of all learnable tensors of a call, tile by tile, given those of the outputs of `plain`."""
    tensors, contiguous = learned(x), torch.contiguous_format
    grads = {name: torch.zeros_like(a, dtype=wide(a).dtype, memory_format=contiguous) for name, a in tensors.items()}
    for part, at, limits in _tiles(x):
        own = {name: _work(_cut(name, a, part, at, x)).detach().requires_grad_() for name, a in tensors.items()}
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), OUTSIDE), torch.enable_grad():
            outs = plain(limits.of(own))
            towards = [_cut("out", dout, part, at, x).to(out.dtype) for dout, out in zip(douts, outs, strict=False)]
            found = torch.autograd.grad(outs, list(own.values()), towards, materialize_grads=True)
        for name, grad in zip(own, found, strict=True):
            _cut(name, grads[name], part, at, x).add_(grad)
    return grads


def _work(x: Tensor) -> Tensor:
    """`x` in the dtype of the computation: on a CPU at least float32, as half precision is no faster there."""
    return wide(x) if x.device.type == "cpu" else x


def _cut(name: str, x: Tensor, part: slice, at: Tile, call: AttentionCall) -> Tensor:
    """A view of the part of `x` that belongs to a tile and to some samples."""
    letters = BY_OFFSET.get((name, x.ndim), CUT.get(name, "")[-x.ndim :])
    parts = {"b": part, "t": at.q, "s": at.k, "n": at.offsets(call.q.shape[1])}
    sizes = zip(letters, x.shape, strict=False)  # a weight has no letters: all tiles share it
    return x[tuple(parts.get(letter, slice(None)) if n > 1 else slice(None) for letter, n in sizes)]


def _tiles(x: AttentionCall) -> Iterator[tuple[slice, Tile, AttentionCall]]:
    """Yield samples, a tile and the call with the tile's limits as a mask.  Tiles without a visible pair are
    skipped."""
    (t, s), b = x.lengths, x.q.shape[0]
    reach = VisibleTiles(t, s, x.q.device, causal=x.causal, window=x.window, cu_seqlens=x.cu_seqlens)
    samples, queries, keys = _sizes(x)
    for q0 in range(0, t, queries):
        q1 = min(q0 + queries, t)
        first, end = reach.keys(q0, q1)
        for k0 in range(first, end, keys):
            at = Tile(q0, q1, k0, min(k0 + keys, end))
            seen = ~reach.hidden(at) if reach.edges(at) else None
            for b0 in range(0, b, samples):
                part = slice(b0, min(b0 + samples, b))
                mask = None if x.mask is None else _cut("mask", x.mask, part, at, x)
                mask = mask if seen is None else seen if mask is None else mask & seen
                keep = None if x.keep is None else _cut("keep", x.keep, part, at, x)
                yield part, at, replace(x.masked(mask), keep=keep)


def _sizes(x: AttentionCall) -> tuple[int, int, int]:
    """Numbers of samples, queries and keys of a tile."""
    (t, s), b, h, e = x.lengths, x.q.shape[0], x.q.shape[2], x.v.shape[-1]
    relations = 0 if x.q_rel is None else x.q_rel.shape[2]
    width = max(1, h, e, relations, 0 if x.value_weight is None else e * max(h, e), h * e if x.pool else 0)
    whole = SOFTMAX_AXIS.get(x.normalise) == "s" or x.act == "softmax" or x.pool != ""
    keys = max(1, s if whole else min(s, KEYS))
    queries = max(1, min(t, QUERIES, NUMBERS // (keys * width)))
    return max(1, min(b, NUMBERS // (queries * keys * width))), queries, keys
