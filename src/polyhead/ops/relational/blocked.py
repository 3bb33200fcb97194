"""Relational attention tile by tile: memory grows with t, not with t^2; the backward pass recomputes what it needs.

One tile holds some queries i with all keys j they may see; p = softmax(scores), a = p keep.

    forward    retrieved_ih = sum_j a_hij symbols_jh            related_ih = sum_j a_hij rel_ij,   rel = act(u)
    backward   da_hij = dretrieved_ih . symbols_jh + drelated_ih . rel_ij         ds = p (da keep - sum_j p da keep)
               drel_ij = sum_h a_hij drelated_ih                                  du = drel act'(u)
               then dq, dk, dbias from ds and dq_rel, dk_rel from du as everywhere

The map from relations to a head's output, W_h related_ih, is left to autograd.  Only the arguments are saved.
Altabaa and Lafferty 2024 (arXiv 2405.16727).

Memory order is (h b q k) for the code and (r b q k) for relations: "for every head" is a batched matrix multiply over
(h b), "for every query", which mixes heads with relations, one over (b q) with rows a head apart; neither copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from torch import Tensor

from polyhead.ops.custom_op_rules import (
    REFERENCES,
    backward_only,
    by_reference,
    check_backward,
    no_second_derivative,
    vmapped,
)
from polyhead.ops.latent_code import Inputs, share, wide
from polyhead.ops.tiles import (
    Buffers,
    Reach,
    Scores,
    Tile,
    accumulate,
    activate,
    activate_backward,
    diagonals,
    given,
    hide,
    product,
    refuse,
)
from polyhead.spec import RELATION_ACTS
from polyhead.spec.shapes import one_of

QUERIES = 64
"""Queries of one tile."""

ROWS = 1 << 22
"""Numbers in the codes of one tile, at most (beyond a single query)."""

PAIRS = 1 << 18
"""Numbers in the relations of one piece of a tile, at most (beyond a single key)."""


def refusal(inputs: Inputs) -> str | None:
    """Why tiles cannot take the inputs, or None."""
    return "takes no relation_act='softmax'" if inputs.act == "softmax" else backward_only(inputs)


def worth(inputs: Inputs) -> bool:
    """Is it measured to be no slower than the reference?

    Forward and backward, CPU seconds of the reference over those of tiles (one core, float32, 8 relations).  Causal:
    1.1 at t = 128 and 1.5 at t = 256 (b = 1), 1.8 at t = 128 (b = 8), 4.4 at t = 1024 (b = 4; 32 relations: 8).
    Full: 0.7 and 0.8 at t = 128 and 256 (b = 1), 1.2 at t = 128 (b = 8), 2.0 at t = 1024.  Up to t = 64, whatever b:
    0.7 to 1.1.
    """
    pairs = inputs.q.shape[1] * inputs.k.shape[1]
    return pairs >= 128 * 128 and (inputs.causal or inputs.q.shape[0] * pairs >= 1 << 17)


def forward(
    q: Tensor,
    k: Tensor,
    q_rel: Tensor,
    k_rel: Tensor,
    symbols: Tensor,
    relation_weight: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    relation_act: str = "identity",
    twice: bool = False,
) -> Tensor:
    """Relational attention by tiles.  Gradients for everything but masks; a second derivative by the reference if
    `twice`, else it is refused."""
    one_of("relational_attention", "relation_act", relation_act, RELATION_ACTS)
    refuse("relational_attention", "blocked", refusal(Inputs(q, k, symbols, keep=keep, act=relation_act)))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    absent = q.new_empty(0)
    bias, *limits = (absent if x is None else x for x in (bias, mask, keep, cu_seqlens))
    tensors, how = [q, k, q_rel, k_rel, symbols, bias], Options(causal, window, scale, relation_act)
    retrieved, related = torch.ops.polyhead.relational_blocked(tensors, limits, **vars(how), twice=twice)
    return retrieved + einsum(relation_weight, related, "h e r, b t h r -> b t h e")


# ------------------------------------------------------------------------------------------------------------- symbols
@dataclass
class Values:
    """Symbols by key ((h b) s e), or by offset (h t+s-1 e), and how a tile of codes (h b q k) reads them."""

    symbols: Tensor
    t: int
    by_offset: bool
    buffers: Buffers

    def skewed(self, at: Tile, a: Tensor) -> Tensor:
        """(h (b q) q+k-1), the codes by offset."""
        h, b, q, k = a.shape
        skewed = self.buffers.take("skewed", (h, b, q, q + k - 1), a.dtype).zero_()
        diagonals(skewed).copy_(a)
        return skewed.flatten(1, 2)

    def read(self, at: Tile, a: Tensor) -> Tensor:
        """(h b q e)."""
        if self.by_offset:
            out = product(self.skewed(at, a), self.symbols[:, at.offsets(self.t)])
        else:
            out = product(a.flatten(0, 1), self.symbols[:, at.k])
        return out.reshape(*a.shape[:3], -1)

    def backward(self, at: Tile, a: Tensor, dout: Tensor, grad: Tensor) -> Tensor:
        """The gradient (h b q k) of the codes, given that of what was read; adds that of the symbols."""
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
class Chunk:
    """Some samples of the batch, laid out for the tiles."""

    scores: Scores
    relations: Scores
    values: Values
    act: str
    samples: int

    def tiles(self) -> Iterator[Tile]:
        """Some queries and all the keys that any of them may see."""
        (t, s), n = (self.scores.q.shape[1], self.scores.k.shape[1]), self.samples
        heads = self.scores.q.shape[0] // n
        step = max(1, min(QUERIES, ROWS // max(1, heads * n * s)))
        for q0 in range(0, t, step):
            q1 = min(q0 + step, t)
            first, end = self.scores.reach.keys(q0, q1)
            if first < end:
                yield Tile(q0, q1, first, end)

    def pieces(self, at: Tile) -> Iterator[Tile]:
        """Of a tile, some keys at a time."""
        step = max(1, PAIRS // max(1, self.relations.q.shape[0] * (at.q1 - at.q0)))
        for k0 in range(at.k0, at.k1, step):
            yield Tile(at.q0, at.q1, k0, min(k0 + step, at.k1))

    def code(self, at: Tile) -> tuple[Tensor, Tensor]:
        """Softmax of the scores (h b q k), and its product with keep."""
        scores = self.scores
        s, hidden = scores.tile(at), scores.hidden(at)
        hide(s, hidden, torch.finfo(s.dtype).min)
        p = torch.softmax(s, -1, out=scores.buffers.take("code", tuple(s.shape), s.dtype))
        if scores.mask is not None or scores.bias_hides or scores.q.shape[1] > scores.k.shape[1]:
            hide(p, hidden, 0.0)  # only here may a row be empty: other queries see at least the key in their own place
        if scores.keep is None:
            return p, p.to(scores.q.dtype)
        dropped = scores.buffers.take("dropped", tuple(s.shape), s.dtype)
        return p, torch.mul(p, scores.keep[:, :, at.q, at.k], out=dropped).to(scores.q.dtype)

    def forward(self, retrieved: Tensor, related: Tensor) -> None:
        """Fill (b t h e) and (b t h r)."""
        for at in self.tiles():
            _, a = self.code(at)
            retrieved[:, at.q] = self.values.read(at, a).permute(1, 2, 0, 3)
            for part in self.pieces(at):
                rel = activate(self.act, self.relations.tile(part))
                total = torch.bmm(by_query(a[..., part.within(at)]), by_query(rel).mT)
                related[:, at.q] += total.unflatten(0, (self.samples, -1))

    def backward(self, dretrieved: Tensor, drelated: Tensor, grads: "Grads") -> None:
        """Add to the gradients, given those of (b t h e) and (b t h r)."""
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

    def relations_backward(self, at: Tile, a: Tensor, drelated: Tensor, da: Tensor, grads: "Grads") -> None:
        """Add to the gradient (h b q k) of the codes and to those of q_rel and k_rel."""
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
class Grads:
    """Where the gradients of a chunk gather, in the dtype of the statistics."""

    q: Tensor  # ((h b) t d)
    k: Tensor  # ((h b) s d)
    q_rel: Tensor  # ((r b) t p)
    k_rel: Tensor  # ((r b) s p)
    symbols: Tensor  # ((h b) s e) or (h t+s-1 e)
    bias: Tensor | None

    @classmethod
    def zeros(cls, chunk: Chunk, bias: Tensor | None) -> "Grads":
        """Nothing yet, but for the bias, whose gradient all chunks share."""
        scores, relations = chunk.scores, chunk.relations
        given = (scores.q, scores.k, relations.q, relations.k, chunk.values.symbols)
        zeros = [torch.zeros(x.shape, dtype=wide(x).dtype, device=x.device) for x in given]
        return cls(*zeros, bias)  # type: ignore[call-arg]

    def add_to(self, grads: list[Tensor], part: slice) -> None:
        """Add to gradients of the arguments (b t h d); heads that share a key add up."""
        for x, grad in zip((self.q, self.k, self.q_rel, self.k_rel, self.symbols), grads, strict=False):
            whole = grad[part] if grad.ndim == 4 else grad.unsqueeze(0)
            n, rows, groups, width = whole.shape
            whole += x.view(groups, len(x) // (groups * n), n, rows, width).sum(1).permute(1, 2, 0, 3)


@dataclass(frozen=True)
class Options:
    """What is not a tensor."""

    causal: bool
    window: int | None
    scale: float
    act: str


def heads_first(x: Tensor) -> Tensor:
    """(b t h d) as ((h b) t d)."""
    return x.permute(2, 0, 1, 3).flatten(0, 1)


def by_head(x: Tensor | None, part: slice) -> Tensor | None:
    """What touches the scores, for some samples: (b|1 h|1 t s) as (h|1 b|1 t s); by offset (h n) as (h 1 n)."""
    if x is None:
        return None
    return x.unsqueeze(1) if x.ndim == 2 else (x if x.shape[0] == 1 else x[part]).transpose(0, 1)


def chunks(tensors: list[Tensor], limits: list[Tensor | None], options: Options) -> Iterator[tuple[slice, Chunk]]:
    """The batch in pieces whose tiles stay in cache, each laid out for its matrix multiplies."""
    q, k, q_rel, k_rel, symbols = tensors
    (b, t, h, _), s, r = q.shape, k.shape[1], q_rel.shape[2]
    stats = wide(q).dtype
    # CPUs multiply half precision no faster than float32; there all work is done in the wider type.
    work = stats if q.device.type == "cpu" else q.dtype
    q, k, q_rel, k_rel = q.to(work), share(k.to(work), h), q_rel.to(work), k_rel.to(work)
    by_offset = symbols.ndim == 3
    symbols = share(symbols.to(work).unsqueeze(0) if by_offset else symbols.to(work), h)
    bias, mask, keep, cu_seqlens = limits
    mask = None if mask is None else mask.expand(b, h, t, s)
    buffers = Buffers(q.device), Buffers(q.device)
    reach = Reach(t, s, q.device, causal=options.causal, window=options.window, cu_seqlens=cu_seqlens)
    full = Reach(t, s, q.device)
    step = max(1, min(b, PAIRS // max(1, min(t, QUERIES) * s * max(h, r))))
    for b0 in range(0, b, step):
        part = slice(b0, min(b0 + step, b))
        n = part.stop - b0
        extra = {"bias": by_head(bias, part), "mask": by_head(mask, part), "keep": by_head(keep, part)}
        queries, keys = heads_first(q[part]), heads_first(k[part])
        scores = Scores(queries, keys, n, options.scale, reach, **extra, stats=stats, buffers=buffers[0])
        queries, keys = heads_first(q_rel[part]), heads_first(k_rel[part])
        scale, none = q_rel.shape[-1] ** -0.5, dict.fromkeys(("bias", "mask", "keep"))
        relations = Scores(queries, keys, n, scale, full, **none, stats=work, buffers=buffers[1])
        values = Values(heads_first(symbols if by_offset else symbols[part]), t, by_offset, buffers[0])
        yield part, Chunk(scores, relations, values, options.act, n)


@torch.library.custom_op("polyhead::relational_blocked", mutates_args=())
def _forward(
    tensors: list[Tensor],
    limits: list[Tensor],
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    act: str,
    twice: bool = False,
) -> tuple[Tensor, Tensor]:
    """Of q, k, q_rel, k_rel, symbols, bias; mask, keep, cu_seqlens."""
    q, _, q_rel, _, symbols, bias = tensors
    wider, options = wide(q).dtype, Options(causal, window, scale, act)
    retrieved, related = (q.new_zeros(*q.shape[:3], n, dtype=wider) for n in (symbols.shape[-1], q_rel.shape[2]))
    with torch.autocast(q.device.type, enabled=False):
        for part, chunk in chunks(tensors[:5], given([bias, *limits]), options):
            chunk.forward(retrieved[part], related[part])
    return retrieved.to(q.dtype), related.to(q.dtype)


@_forward.register_fake
def _(tensors, limits, *, causal, window=None, scale, act, twice=False):  # type: ignore[no-untyped-def]
    q, _, q_rel, _, symbols, _ = tensors
    return q.new_empty(*q.shape[:3], symbols.shape[-1]), q.new_empty(*q.shape[:3], q_rel.shape[2])


@torch.library.custom_op("polyhead::relational_blocked_backward", mutates_args=())
def _backward(
    douts: list[Tensor],
    tensors: list[Tensor],
    limits: list[Tensor],
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    act: str,
) -> list[Tensor]:
    """Gradients of q, k, q_rel, k_rel, symbols and bias; empty if there is no bias."""
    bias = tensors[5]
    grads = [torch.zeros_like(x, dtype=wide(x).dtype, memory_format=torch.contiguous_format) for x in tensors]
    with torch.autocast(bias.device.type, enabled=False):
        for part, chunk in chunks(tensors[:5], given([bias, *limits]), Options(causal, window, scale, act)):
            own = Grads.zeros(chunk, by_head(grads[-1], part) if bias.numel() else None)
            dretrieved, drelated = (x[part].to(chunk.scores.q.dtype) for x in douts)
            chunk.backward(dretrieved, drelated, own)
            own.add_to(grads, part)
    return [x.to(like.dtype) for x, like in zip(grads, tensors, strict=True)]


@_backward.register_fake
def _(douts, tensors, limits, *, causal, window=None, scale, act):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _grad(ctx, *douts):  # type: ignore[no-untyped-def]
    check_backward("relational_attention", "blocked")
    saved = list(ctx.saved_tensors)  # once: checkpointing unpacks them once only
    tensors, limits, options = saved[:6], saved[6:], dict(ctx.options)
    if options.pop("twice", False) and torch.is_grad_enabled():
        grads = by_reference(lambda own: _anew(own, limits, options), tensors, douts)
    else:
        grads = torch.ops.polyhead.relational_blocked_backward(list(douts), tensors, limits, **options)
    return grads, [None] * len(limits)


def _anew(tensors: list[Tensor], limits: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The forward pass by the reference: retrieved, without relations, and related, by the unit matrix."""
    *queries, symbols, bias = tensors
    bias, mask, keep, cu_seqlens = given([bias, *limits])  # type: ignore[assignment]
    extra = {"bias": bias, "mask": mask, "keep": keep, "cu_seqlens": cu_seqlens}
    extra |= {"relation_act" if name == "act" else name: value for name, value in options.items()}
    (b, _, h, _), s, r = queries[0].shape, queries[1].shape[1], queries[2].shape[2]
    run, unit = REFERENCES["relational"], torch.eye(r, dtype=symbols.dtype, device=symbols.device)
    retrieved = run(*queries, symbols, symbols.new_zeros(h, symbols.shape[-1], r), **extra)
    return retrieved, run(*queries, symbols.new_zeros(b, s, 1, r), unit.expand(h, r, r), **extra)


_forward.register_autograd(_grad, setup_context=_setup)
_backward.register_autograd(no_second_derivative("relational_attention", "blocked"))
_forward.register_vmap(vmapped(_forward))
