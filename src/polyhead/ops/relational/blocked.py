"""Relational attention in tiles: memory O(t) instead of O(t^2); the backward pass recomputes the code.

A tile has some queries i and all keys j that they may attend to; p = softmax(scores), a = p keep.

    forward    retrieved_ih = sum_j a_hij symbols_jh            related_ih = sum_j a_hij rel_ij,   rel = act(u)
    backward   da_hij = dretrieved_ih . symbols_jh + drelated_ih . rel_ij         ds = p (da keep - sum_j p da keep)
               drel_ij = sum_h a_hij drelated_ih                                  du = drel act'(u)
               then dq, dk, dbias from ds and dq_rel, dk_rel from du as everywhere

The map from relations to a head's output, W_h related_ih, is left to autograd.  Only the arguments are saved.
Altabaa and Lafferty 2024 (arXiv 2405.16727).

The layout is (h b q k) for the code and (r b q k) for relations.  A product per head is one batched product over (h b).
A product per query, which mixes heads with relations, is one over (b q).  Neither needs a copy.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from einops import einsum
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Gradients, Kernel, backward_only, custom_op
from polyhead.ops.latent_code import retrieved_and_related, share, wide
from polyhead.ops.tiles import (
    Buffers,
    Scores,
    Tile,
    VisibleTiles,
    accumulate,
    activate,
    activate_backward,
    diagonals,
    hide,
    product,
)
from polyhead.ops.tiling import Blocked

QUERIES = 64
"""Queries in one tile."""

ROWS = 1 << 22
"""The most numbers in the codes of one tile; a tile has at least one query."""

PAIRS = 1 << 18
"""The most numbers in the relations of one part of a tile; a part has at least one key."""


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why tiles cannot take a call, or None.  They take all calls but those that need derivatives custom ops lack."""
    return backward_only(x)


def preferred(x: AttentionCall) -> bool:
    """Is it measured to be no slower than the reference?

    Forward and backward, CPU seconds of the reference over those of tiles (one core, float32, 8 relations).  Causal:
    1.1 at t = 128 and 1.5 at t = 256 (b = 1), 1.8 at t = 128 (b = 8), 4.4 at t = 1024 (b = 4; 32 relations: 8).
    Full: 0.7 and 0.8 at t = 128 and 256 (b = 1), 1.2 at t = 128 (b = 8), 2.0 at t = 1024.  Up to t = 64, for every b:
    0.7 to 1.1.
    """
    if x.act == "softmax":
        return _softmax.preferred(x)
    pairs = x.q.shape[1] * x.k.shape[1]
    return pairs >= 128 * 128 and (x.causal or x.q.shape[0] * pairs >= 1 << 17)


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """Relational attention in tiles, with gradients of everything but masks.

    If `twice`, the reference computes second derivatives; otherwise they raise RuntimeError.
    """
    if x.act == "softmax":
        return _softmax.forward(x, twice)
    retrieved, related = _op(replace(x, relation_weight=None), twice)
    return retrieved + einsum(x.relation_map, related, "h e r, b t h r -> b t h e")


# ------------------------------------------------------------------------------------------------------------- symbols
@dataclass
class TileSymbols:
    """Symbols by key ((h b) s e) or by offset (h t+s-1 e), and their products with a tile of codes (h b q k)."""

    symbols: Tensor
    t: int
    by_offset: bool
    buffers: Buffers

    def skewed(self, at: Tile, a: Tensor) -> Tensor:
        """The codes by offset: (h (b q) q+k-1)."""
        h, b, q, k = a.shape
        skewed = self.buffers.take("skewed", (h, b, q, q + k - 1), a.dtype).zero_()
        diagonals(skewed).copy_(a)
        return skewed.flatten(1, 2)

    def read(self, at: Tile, a: Tensor) -> Tensor:
        """The sum of symbols weighted by the codes: (h b q e)."""
        if self.by_offset:
            out = product(self.skewed(at, a), self.symbols[:, at.offsets(self.t)])
        else:
            out = product(a.flatten(0, 1), self.symbols[:, at.k])
        return out.reshape(*a.shape[:3], -1)

    def backward(self, at: Tile, a: Tensor, dout: Tensor, grad: Tensor) -> Tensor:
        """The gradient (h b q k) of the codes, given that of `read`; adds the gradient of the symbols to `grad`."""
        h, b, q, k = a.shape
        rows = dout.flatten(1, 2) if self.by_offset else dout.flatten(0, 1)
        if not self.by_offset:
            accumulate(grad[:, at.k], a.flatten(0, 1).transpose(1, 2), rows)
            da = self.buffers.take("da", (h * b, q, k), a.dtype)
            return torch.bmm(rows, self.symbols[:, at.k].transpose(1, 2), out=da).view(h, b, q, k)
        near = at.offsets(self.t)
        accumulate(grad[:, near], self.skewed(at, a).transpose(1, 2), rows)
        da = self.buffers.take("skewed", (h, b * q, q + k - 1), a.dtype)
        torch.bmm(rows, self.symbols[:, near].transpose(1, 2), out=da)
        return self.buffers.take("da", (h, b, q, k), a.dtype).copy_(diagonals(da.view(h, b, q, -1)))


# --------------------------------------------------------------------------------------------------------------- tiles
@dataclass
class RelationalChunk:
    """Some samples of the batch, in the layout of the tiles."""

    scores: Scores
    relations: Scores
    values: TileSymbols
    act: str
    samples: int

    def tiles(self) -> Iterator[Tile]:
        """Yield tiles of some queries and all keys that any of them may attend to."""
        (t, s), n = (self.scores.q.shape[1], self.scores.k.shape[1]), self.samples
        heads = self.scores.q.shape[0] // n
        step = max(1, min(QUERIES, ROWS // max(1, heads * n * s)))
        for q0 in range(0, t, step):
            q1 = min(q0 + step, t)
            first, end = self.scores.reach.keys(q0, q1)
            if first < end:
                yield Tile(q0, q1, first, end)

    def pieces(self, at: Tile) -> Iterator[Tile]:
        """Yield parts of a tile: all its queries, some of its keys."""
        step = max(1, PAIRS // max(1, self.relations.q.shape[0] * (at.q1 - at.q0)))
        for k0 in range(at.k0, at.k1, step):
            yield Tile(at.q0, at.q1, k0, min(k0 + step, at.k1))

    def code(self, at: Tile) -> tuple[Tensor, Tensor]:
        """The softmax p of the scores (h b q k), and the code p keep."""
        scores = self.scores
        s, hidden = scores.tile(at), scores.hidden(at)
        hide(s, hidden, -math.inf)
        p = torch.softmax(s, -1, out=scores.buffers.take("code", tuple(s.shape), s.dtype))
        if scores.mask is not None or scores.bias_hides or scores.q.shape[1] > scores.k.shape[1]:
            hide(p, hidden, 0.0)  # otherwise each query sees at least the key at its own position
        if scores.keep is None:
            return p, p.to(scores.q.dtype)
        dropped = scores.buffers.take("dropped", tuple(s.shape), s.dtype)
        return p, torch.mul(p, scores.keep[:, :, at.q, at.k], out=dropped).to(scores.q.dtype)

    def forward(self, retrieved: Tensor, related: Tensor) -> None:
        """Fill the outputs `retrieved` (b t h e) and `related` (b t h r)."""
        for at in self.tiles():
            _, a = self.code(at)
            retrieved[:, at.q] = self.values.read(at, a).permute(1, 2, 0, 3)
            for part in self.pieces(at):
                rel = activate(self.act, self.relations.tile(part))
                total = torch.bmm(by_query(a[..., part.within(at)]), by_query(rel).mT)
                related[:, at.q] += total.unflatten(0, (self.samples, -1))

    def backward(self, dretrieved: Tensor, drelated: Tensor, grads: "RelationalGradients") -> None:
        """Add to `grads`, given the gradients of `retrieved` (b t h e) and `related` (b t h r)."""
        for at in self.tiles():
            p, a = self.code(at)
            rows = dretrieved[:, at.q].permute(2, 0, 1, 3).contiguous()
            da = self.values.backward(at, a, rows, grads.symbols)
            rows = drelated[:, at.q].flatten(0, 1)
            for part in self.pieces(at):
                own = part.within(at)
                self.relations_backward(part, a[..., own], rows, da[..., own], grads)
            if self.scores.keep is not None:
                da.mul_(self.scores.keep[:, :, at.q, at.k])
            aten, da = torch.ops.aten, da.to(p.dtype)
            ds = aten._softmax_backward_data.out(da, p, -1, p.dtype, grad_input=da)
            self.scores.backward(at, ds, grads.q, grads.k, grads.bias)

    def relations_backward(
        self, at: Tile, a: Tensor, drelated: Tensor, da: Tensor, grads: "RelationalGradients"
    ) -> None:
        """Add to the gradient `da` (h b q k) of the codes and to the gradients of q_rel and k_rel."""
        u = self.relations.tile(at)
        rel = activate(self.act, u)
        (h, b, q, k), r = a.shape, u.shape[0]
        take = self.relations.buffers.take
        first = torch.bmm(drelated, by_query(rel), out=take("first", (b * q, h, k), a.dtype))
        da.add_(first.view(b, q, h, k).permute(2, 0, 1, 3))
        drel = torch.bmm(drelated.transpose(1, 2), by_query(a), out=take("drel", (b * q, r, k), a.dtype))
        du = drel.view(b, q, r, k).permute(2, 0, 1, 3)
        if self.act != "identity":
            du = activate_backward(self.act, du, u, take("du", (r, b, q, k), a.dtype))
        self.relations.backward(at, du, grads.q_rel, grads.k_rel, None)


def by_query(x: Tensor) -> Tensor:
    """(h b q k) as ((b q) h k)."""
    return x.flatten(1, 2).transpose(0, 1)


# ---------------------------------------------------------------------------------------------------- chunks of a call
@dataclass
class RelationalGradients:
    """The gradients of a chunk, summed in the dtype of the statistics."""

    q: Tensor  # ((h b) t d)
    k: Tensor  # ((h b) s d)
    q_rel: Tensor  # ((r b) t p)
    k_rel: Tensor  # ((r b) s p)
    symbols: Tensor  # ((h b) s e) or (h t+s-1 e)
    bias: Tensor | None

    @classmethod
    def zeros(cls, chunk: RelationalChunk, bias: Tensor | None) -> "RelationalGradients":
        """Zeros, except for the bias: all chunks add to the same gradient of the bias."""
        scores, relations = chunk.scores, chunk.relations
        given = (scores.q, scores.k, relations.q, relations.k, chunk.values.symbols)
        zeros = [torch.zeros(x.shape, dtype=wide(x).dtype, device=x.device) for x in given]
        return cls(*zeros, bias)  # type: ignore[call-arg]

    def add_to(self, grads: Gradients, part: slice) -> None:
        """Add to the gradients of the arguments (b t h d), summed over the heads that share a key."""
        found = {"q": self.q, "k": self.k, "q_rel": self.q_rel, "k_rel": self.k_rel, "v": self.symbols}
        for name, own in found.items():
            grad = grads[name]
            whole = grad[part] if grad.ndim == 4 else grad.unsqueeze(0)
            n, rows, groups, width = whole.shape
            whole += own.view(groups, len(own) // (groups * n), n, rows, width).sum(1).permute(1, 2, 0, 3)


def heads_first(x: Tensor) -> Tensor:
    """(b t h d) as ((h b) t d)."""
    return x.permute(2, 0, 1, 3).flatten(0, 1)


def by_head(x: Tensor | None, part: slice) -> Tensor | None:
    """A bias, mask or keep of some samples: (b|1 h|1 t s) as (h|1 b|1 t s); by offset (h n) as (h 1 n)."""
    if x is None:
        return None
    return x.unsqueeze(1) if x.ndim == 2 else (x if x.shape[0] == 1 else x[part]).transpose(0, 1)


def chunks(x: AttentionCall) -> Iterator[tuple[slice, RelationalChunk]]:
    """Yield the batch in chunks whose tiles fit into the cache, each in the layout of its matrix products."""
    (b, t, h, _), s = x.q.shape, x.k.shape[1]
    stats = wide(x.q).dtype
    # CPUs multiply half precision no faster than float32, so they compute in the wider dtype.
    work = stats if x.q.device.type == "cpu" else x.q.dtype
    q, k, (q_rel, k_rel) = x.q.to(work), share(x.k.to(work), h), (a.to(work) for a in x.related)
    r, scale = q_rel.shape[2], q_rel.shape[-1] ** -0.5
    by_offset = x.symbols.ndim == 3
    symbols = share((x.symbols[None] if by_offset else x.symbols).to(work), h)
    mask = None if x.mask is None else x.mask.expand(b, h, t, s)
    buffers = Buffers(q.device), Buffers(q.device)
    reach = VisibleTiles(t, s, q.device, causal=x.causal, window=x.window, cu_seqlens=x.cu_seqlens)
    everywhere = VisibleTiles(t, s, q.device)
    step = max(1, min(b, PAIRS // max(1, min(t, QUERIES) * s * max(h, r))))
    for first in range(0, b, step):
        part = slice(first, min(first + step, b))
        n = part.stop - first
        bias, masked, keep = (by_head(a, part) for a in (x.bias, mask, x.keep))
        queries, keys = heads_first(q[part]), heads_first(k[part])
        scores = Scores(queries, keys, n, x.factor, reach, bias, masked, keep, stats, buffers[0])
        queries, keys = heads_first(q_rel[part]), heads_first(k_rel[part])
        relations = Scores(queries, keys, n, scale, everywhere, None, None, None, work, buffers[1])
        values = TileSymbols(heads_first(symbols if by_offset else symbols[part]), t, by_offset, buffers[0])
        yield part, RelationalChunk(scores, relations, values, x.act, n)


def _forward(x: AttentionCall) -> list[Tensor]:
    """The sums over symbols (b t h e) and over relations (b t h r)."""
    retrieved, related = (torch.zeros_like(like, dtype=wide(like).dtype) for like in _like(x))
    for part, chunk in chunks(x):
        chunk.forward(retrieved[part], related[part])
    return [retrieved.to(x.q.dtype), related.to(x.q.dtype)]


def _backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    q_rel, k_rel = x.related
    learned = {"q": x.q, "k": x.k, "q_rel": q_rel, "k_rel": k_rel, "v": x.symbols}
    learned |= {} if x.bias is None else {"bias": x.bias}
    contiguous = torch.contiguous_format
    grads = {name: torch.zeros_like(a, dtype=wide(a).dtype, memory_format=contiguous) for name, a in learned.items()}
    for part, chunk in chunks(x):
        own = RelationalGradients.zeros(chunk, by_head(grads.get("bias"), part))
        dretrieved, drelated = (dout[part].to(chunk.scores.q.dtype) for dout in douts)
        chunk.backward(dretrieved, drelated, own)
        own.add_to(grads, part)
    return grads


def _like(x: AttentionCall) -> list[Tensor]:
    return [x.q.new_empty(*x.q.shape[:3], n) for n in (x.symbols.shape[-1], x.related[0].shape[2])]


_op = custom_op(Kernel("relational", "blocked", _forward, _backward, _like, retrieved_and_related))
_softmax = Blocked("relational", "blocked_softmax")  # a softmax of relations needs whole rows
