"""Any op tile by tile, made from its reference: memory grows with t, not with t^2, and gradients are exact.

The output of every mechanism is a sum over keys, so a tile of queries i and keys j is a small call of the reference:

    out_i       = sum over tiles of reference(q_i, k_j, v_j, bias_ij, ...)
    gradients   = sum over tiles of those of the reference, given dout_i

A tile has all keys that its queries may see where something is normalised over keys, otherwise some of them.  Only the
arguments are saved; the backward pass computes each tile again.  Sums are in at least float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import LEARNED, REFERENCES, Gradients, Kernel, Outputs, backward_only, custom_op
from polyhead.ops.latent_code import wide
from polyhead.ops.tiles import Reach, Tile, refuse
from polyhead.spec import SOFTMAX_AXIS

QUERIES, KEYS = 128, 256
"""Queries of a tile, and keys where it need not have all of them, at most."""

NUMBERS = 1 << 23
"""Numbers in the widest intermediate of a tile, at most (beyond a single query)."""

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
"""Axes of what belongs to a tile; axes of size 1 belong to all tiles."""

BY_OFFSET = {("bias", 2): "hn", ("v", 3): "nge"}

OUTSIDE = torch._C._dispatch_tls_local_exclude_set()
"""What no op is given to, outside of any other op: a compiled graph runs ours where nothing would be differentiated."""


class Blocked:
    """The impl "blocked" of the op of a folder, whose public function is `who`; `name` is that of its custom op."""

    def __init__(self, op: str, who: str, name: str = "blocked") -> None:
        self.op, self.who = op, who
        self._op = custom_op(Kernel(op, name, who, self._forward, self._backward, _like))

    def unsupported_reason(self, x: AttentionCall) -> str | None:
        """Why tiles cannot take a call, or None: of what the reference takes, derivatives that custom ops lack."""
        return backward_only(x)

    def preferred(self, x: AttentionCall) -> bool:
        """Is it measured to be no slower than the reference?

        Forward and backward, CPU time of tiles over that of the reference (one core, b 1, h 8, d 64, softmax,
        disentangled and pointwise Abstractor).  Causal: 0.7 to 1.2 at t = 512, 0.5 to 0.6 at 1024 and 2048.  Full: 1.2
        to 1.4 at 512, 1.0 to 1.2 at 1024, 1.2 to 1.3 at 2048.  There the reference is left for its memory, from
        2^26 pairs b t s on: each of its (b h t s) would have 2 GB.
        """
        pairs = x.q.shape[0] * x.q.shape[1] * x.k.shape[1]
        return pairs >= (1 << 20 if x.causal else 1 << 26)

    def forward(self, x: AttentionCall, twice: bool = False) -> Tensor:
        """The op by tiles.  A second derivative is the reference's if `twice`, else it is refused."""
        refuse(self.who, "blocked", self.unsupported_reason(x))
        return self._op(x, twice)[0]

    def _plain(self, x: AttentionCall) -> Outputs:
        return [REFERENCES[self.op](x)]

    def _forward(self, x: AttentionCall) -> Outputs:
        return outputs_by_tiles(self._plain, x, _like(x))

    def _backward(self, x: AttentionCall, douts: Outputs) -> Gradients:
        return gradients_by_tiles(self._plain, x, douts)


def _like(x: AttentionCall) -> list[Tensor]:
    return [x.q.new_empty(*x.q.shape[:3], x.v.shape[-1])]


def outputs_by_tiles(plain: Callable[[AttentionCall], Outputs], x: AttentionCall, like: Outputs) -> Outputs:
    """What `plain` gives, tile by tile: (b t h _) as `like`; further ones of those are 0."""
    totals = [torch.zeros_like(out, dtype=wide(out).dtype) for out in like]
    with torch.no_grad():
        for part, at, limits in _tiles(x):
            learned = {name: _work(_cut(name, a, part, at, x)) for name, a in _learned(x).items()}
            for total, out in zip(totals, plain(limits.of(learned)), strict=False):
                _cut("out", total, part, at, x).add_(out)
    return [total.to(out.dtype) for total, out in zip(totals, like, strict=True)]


def gradients_by_tiles(plain: Callable[[AttentionCall], Outputs], x: AttentionCall, douts: Outputs) -> Gradients:
    """Gradients of what a call has that may have one, given those of the outputs of `plain`, tile by tile."""
    learned, contiguous = _learned(x), torch.contiguous_format
    grads = {name: torch.zeros_like(a, dtype=wide(a).dtype, memory_format=contiguous) for name, a in learned.items()}
    for part, at, limits in _tiles(x):
        own = {name: _work(_cut(name, a, part, at, x)).detach().requires_grad_() for name, a in learned.items()}
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), OUTSIDE), torch.enable_grad():
            outs = plain(limits.of(own))
            towards = [_cut("out", dout, part, at, x).to(out.dtype) for dout, out in zip(douts, outs, strict=False)]
            found = torch.autograd.grad(outs, list(own.values()), towards, materialize_grads=True)
        for name, grad in zip(own, found, strict=True):
            _cut(name, grads[name], part, at, x).add_(grad)
    return grads


def _learned(x: AttentionCall) -> dict[str, Tensor]:
    """What a call has that may have a gradient."""
    given = (x.q, x.k, x.v, x.q_rel, x.k_rel, x.relation_weight, x.value_weight, x.bias)
    return {name: a for name, a in zip(LEARNED, given, strict=True) if a is not None}


def _work(x: Tensor) -> Tensor:
    """As a tile computes with it: CPUs multiply half precision no faster than float32."""
    return wide(x) if x.device.type == "cpu" else x


def _cut(name: str, x: Tensor, part: slice, at: Tile, call: AttentionCall) -> Tensor:
    """What belongs to a tile of some samples, a view."""
    letters = BY_OFFSET.get((name, x.ndim), CUT.get(name, "")[-x.ndim :])
    parts = {"b": part, "t": at.q, "s": at.k, "n": at.offsets(call.q.shape[1])}
    sizes = zip(letters, x.shape, strict=False)  # of a weight, which belongs to all tiles, there are no letters
    return x[tuple(parts.get(letter, slice(None)) if n > 1 else slice(None) for letter, n in sizes)]


def _tiles(x: AttentionCall) -> Iterator[tuple[slice, Tile, AttentionCall]]:
    """Samples, a tile of theirs, and the call with what limits that tile as a mask.  Not those that see nothing."""
    (t, s), b = x.lengths, x.q.shape[0]
    reach = Reach(t, s, x.q.device, causal=x.causal, window=x.window, cu_seqlens=x.cu_seqlens)
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
    """Samples, queries and keys of a tile."""
    (t, s), b, h, e = x.lengths, x.q.shape[0], x.q.shape[2], x.v.shape[-1]
    relations = 0 if x.q_rel is None else x.q_rel.shape[2]
    width = max(1, h, e, relations, 0 if x.value_weight is None else e * max(h, e))
    whole = SOFTMAX_AXIS.get(x.normalise) == "s" or x.act == "softmax"
    keys = max(1, s if whole else min(s, KEYS))
    queries = max(1, min(t, QUERIES, NUMBERS // (keys * width)))
    return max(1, min(b, NUMBERS // (queries * keys * width))), queries, keys
