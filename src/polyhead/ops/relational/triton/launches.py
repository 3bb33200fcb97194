"""Launches of the kernels of relational attention: parts of heads and relations, tiles, grids.

A program holds at most `WIDE` numbers per row.  Beyond that, heads are cut into parts; so are relations, which only
enter as sums.  The caller sums over parts.  This file imports triton, so it is imported only where a kernel is about to
run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from polyhead.ops.latent_code import at_least_float32
from polyhead.ops.relational.triton.kernels import backward_keys, backward_offsets, backward_queries, forward
from polyhead.ops.triton_tiles import SMALLEST, Block, Dots, Launch, RuntimeMasks, Sight, dots, padded, pair, strides

WIDE = 512
"""The most heads x padded width that one program holds in 16-bit numbers; for wider numbers, in proportion fewer.

It is halved on a GPU with less than 128 KB of shared memory per program.
"""

RELATED = 256
"""The most heads x relations that one program holds."""

PROGRAMS, SPLIT = 256, 128
"""With fewer programs than half of PROGRAMS, several divide the keys of a tile; each gets at least SPLIT keys."""

TILE = 16
"""Queries and keys of one tile; the forward pass takes twice as many queries if they fit."""


@dataclass(frozen=True)
class Compiled:
    """Compile-time constants.  Only the first part of the relations reads the symbols (`reads`)."""

    q: Block
    k: Block
    q_rel: Block
    k_rel: Block
    symbols: Block  # by key, or the offsets of a tile
    read: Block
    related: Block
    sight: Sight
    dots: Dots
    act: str
    deep_heads: int
    deep_relations: int
    own_keys: bool
    by_offset: bool
    reads: bool


@dataclass(frozen=True)
class HeadPart:
    """Some heads, the keys they read, and some relations."""

    heads: slice
    groups: slice
    relations: slice
    number: tuple[int, int]  # index of the part of heads, of relations

    def queries(self, x: Tensor) -> Tensor:
        """This part of a tensor (b t h _)."""
        return x[:, :, self.heads]

    def keys(self, x: Tensor) -> Tensor:
        """This part of a tensor (b s g _)."""
        return x[:, :, self.groups]

    def related(self, x: Tensor) -> Tensor:
        """This part of a tensor (b t r _)."""
        return x[:, :, self.relations]


@dataclass(frozen=True)
class RelationalKernelCall:
    """The arguments.  Symbols are (b s g e), or by offset (b t+s-1 g e) with stride 0 between samples."""

    q: Tensor
    k: Tensor
    q_rel: Tensor
    k_rel: Tensor
    symbols: Tensor
    bias: Tensor | None
    limits: RuntimeMasks
    causal: bool
    scale: float
    act: str
    by_offset: bool
    shared: int = 227 << 10  # bytes of shared memory per program

    def counts(self) -> tuple[int, int]:
        """The most heads and relations of a part."""
        numbers = WIDE * 2 // self.q.dtype.itemsize
        numbers = numbers if self.shared >= 1 << 17 else numbers // 2
        h, share = self.q.shape[2], self.q.shape[2] // self.k.shape[2]
        width = max(padded(self.q.shape[-1]), padded(self.symbols.shape[-1]))
        fit = [
            n
            for n in range(1, h + 1)
            if triton.next_power_of_2(n) * width <= numbers and (n % share == 0 or share % n == 0)
        ]
        heads = max(fit, default=1)
        some = min(numbers // padded(self.q_rel.shape[-1]), RELATED // triton.next_power_of_2(heads))
        return heads, max(1, min(some, self.q_rel.shape[2]))

    def parts(self) -> Iterator[HeadPart]:
        """Yield all parts; the relations vary fastest."""
        (h, r), share = (self.q.shape[2], self.q_rel.shape[2]), self.q.shape[2] // self.k.shape[2]
        heads, relations = self.counts()
        for n, h0 in enumerate(range(0, h, heads)):
            h1 = min(h0 + heads, h)
            for m, r0 in enumerate(range(0, r, relations)):
                groups = slice(h0 // share, (h1 - 1) // share + 1)
                yield HeadPart(slice(h0, h1), groups, slice(r0, min(r0 + relations, r)), (n, m))

    def plan(self, part: HeadPart, queries: int = TILE) -> Compiled:
        """Compile-time constants of a program that owns queries."""
        q, k, symbols = part.queries(self.q), part.keys(self.k), part.keys(self.symbols)
        q_rel, heads, keys = part.related(self.q_rel), part.heads.stop - part.heads.start, TILE
        r, (d, p, e), share = q_rel.shape[2], (x.shape[-1] for x in (q, q_rel, symbols)), heads // k.shape[2]
        rows = triton.next_power_of_2(queries + keys) if self.by_offset else keys
        # At least two: batched products with a single column are miscompiled (by triton 3.7.1 and 3.9.0).
        few, many = triton.next_power_of_2(heads), max(2, triton.next_power_of_2(r))
        return Compiled(
            q=Block(queries, heads, d, few, padded(d)),
            k=Block(keys, heads, d, few, padded(d), share),
            q_rel=Block(queries, r, p, many, padded(p)),
            k_rel=Block(keys, r, p, many, padded(p)),
            symbols=Block(rows, heads, e, few, padded(e), share),
            read=Block(queries, heads, e, few, padded(e)),
            related=Block(queries, heads, r, few, many),
            sight=Sight(queries, keys, self.causal),
            dots=dots(q.dtype),
            act=self.act,
            deep_heads=max(SMALLEST, few),
            deep_relations=max(SMALLEST, many),
            own_keys=False,
            by_offset=self.by_offset,
            reads=part.number[1] == 0,
        )

    def key_side(self, part: HeadPart) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor | None]:
        """Keys and relation keys, symbols, bias."""
        bias = None if self.bias is None else self.bias[part.heads]
        return (part.keys(self.k), part.related(self.k_rel)), part.keys(self.symbols), bias

    def settings(self) -> tuple[tuple[float, float], tuple[float, float], RuntimeMasks]:
        return pair(self.scale), pair(self.q_rel.shape[-1] ** -0.5), self.limits

    def tiles(self, rows: int, tile: int) -> tuple[int]:
        """A grid with tiles and samples on one axis; the other axes are limited to 65,535."""
        return (triton.cdiv(rows, tile) * self.q.shape[0],)


def all_strides(tensors: tuple[Tensor, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(map(strides, tensors))


def shares(call: RelationalKernelCall) -> int:
    """How many programs divide the keys of a tile of queries: more than one if there are few programs."""
    (b, t), s = call.q.shape[:2], call.k.shape[1]
    programs = max(1, b * triton.cdiv(t, TILE) * len([part for part in call.parts() if part.number[1] == 0]))
    return 1 if 2 * programs >= PROGRAMS else max(1, min(PROGRAMS // programs, triton.cdiv(s, SPLIT)))


def together(parts: Sequence[Tensor], n: int, out: Sequence[Tensor]) -> None:
    """Fill `out` from `n` parts of the keys; each part is weighted by its part of the softmax's sum."""
    *read, softmax = (x.unflatten(0, (n, -1)) for x in parts)
    top, share = softmax.unbind(2)
    top = top.masked_fill(share == 0, -torch.inf)  # a part without keys
    highest = top.amax(0)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    weight = (top - highest).exp() / share.masked_fill(share == 0, 1)
    total = weight.sum(0)
    whole = 1 / total.masked_fill(total == 0, torch.inf)
    weight = (weight * whole).transpose(2, 3).unsqueeze(-1)
    for x, y in zip(read, out[:2], strict=True):
        y.copy_((weight * x).sum(0))
    out[2].copy_(torch.stack((highest, whole), 1))


def forward_launches(call: RelationalKernelCall, out: Sequence[Tensor], n: int = 1) -> Iterator[Launch]:
    """Launches that fill outputs (b t h e) and (b t h r) and the softmax's sums (b 2 h t), for n parts of the keys."""
    t, s = call.q.shape[1], call.k.shape[1]
    share = None if n == 1 else triton.cdiv(triton.cdiv(s, n), TILE) * TILE
    for part in call.parts():
        C = call.plan(part)
        few = C.related.heads_padded * C.related.width_padded <= RELATED // 2
        if few and call.q.dtype.itemsize == 2 and not call.by_offset:
            C = call.plan(part, 2 * TILE)
        own = part.queries(call.q), part.related(call.q_rel)
        keys, symbols, bias = call.key_side(part)
        filled = part.queries(out[0]), part.queries(out[1])[..., part.relations]
        tensors = *own, keys, symbols, bias, *filled, out[2][:, :, part.heads]
        steps = *all_strides(own), all_strides(keys), strides(symbols), *all_strides(filled), call.q.shape[2]
        grid, settings = (*call.tiles(t, C.q.rows), n), (*call.settings(), share)
        yield Launch(forward, grid, (tensors, steps, t, s, settings, C), *warps_stages(C, 2))


@dataclass(frozen=True)
class OutputGradients:
    """Inputs of the backward pass beside the arguments: both outputs' gradients, sums of the softmax, of code x da."""

    dretrieved: Tensor
    drelated: Tensor
    softmax: Tensor  # (b 2 h t)
    delta: Tensor  # (b h t)


@dataclass(frozen=True)
class PartialGradients:
    """Gradients before they are summed over parts, query heads of a group and (bias) tiles of queries.

    n counts parts of heads, m parts of relations, i tiles of queries.
    """

    q: Tensor  # (m b t h d)
    k: Tensor  # (m b s h d)
    q_rel: Tensor  # (n b t r p)
    k_rel: Tensor  # (n b s r p)
    symbols: Tensor  # (b s h e), or by offset (b t+s-1 h e)
    bias: Tensor | None  # (m b i h t+s-1)

    @classmethod
    def empty(cls, call: RelationalKernelCall) -> "PartialGradients":
        """Uninitialised gradients."""
        (b, t, h, _), s, dtype = call.q.shape, call.k.shape[1], at_least_float32(call.q.dtype)
        counts = [part.number for part in call.parts()]
        n, m = (max(count) + 1 for count in zip(*counts, strict=True))
        empty, bias = lambda *shape: call.q.new_empty(shape, dtype=dtype), None
        if call.bias is not None:
            bias = call.q.new_zeros((m, b, triton.cdiv(t, TILE), h, t + s - 1), dtype=dtype)
        return cls(
            q=empty(m, *call.q.shape),
            k=empty(m, *call.k.shape[:2], h, call.k.shape[3]),
            q_rel=empty(n, *call.q_rel.shape),
            k_rel=empty(n, *call.k_rel.shape),
            symbols=empty(*call.symbols.shape[:2], h, call.symbols.shape[3]),
            bias=bias,
        )

    def total(self, call: RelationalKernelCall) -> list[Tensor]:
        """The gradients of q, k, q_rel, k_rel, symbols and bias (if given), in their shapes."""
        groups = call.k.shape[2]
        k = self.k.sum(0).unflatten(2, (groups, -1)).sum(3)
        symbols = self.symbols.unflatten(2, (groups, -1)).sum(3)
        symbols = symbols.sum(0) if call.by_offset else symbols
        bias = [] if self.bias is None else [self.bias.sum((0, 1, 2))]
        return [self.q.sum(0), k, self.q_rel.sum(0), self.k_rel.sum(0), symbols, *bias]


def backward_launches(call: RelationalKernelCall, above: OutputGradients, grads: PartialGradients) -> Iterator[Launch]:
    """Launches that fill the gradients."""
    (_, t, heads, _), s = call.q.shape, call.k.shape[1]
    for part in call.parts():
        C, (n, m) = call.plan(part), part.number
        given = part.queries(above.dretrieved), part.queries(above.drelated)[..., part.relations]
        stats = above.softmax[:, :, part.heads], above.delta[:, part.heads]
        own = part.queries(call.q), part.related(call.q_rel), *given, *stats
        keys, symbols, bias = call.key_side(part)
        dq, dk, dsymbols = (part.queries(x) for x in (grads.q[m], grads.k[m], grads.symbols))
        dq_rel, dk_rel = part.related(grads.q_rel[n]), part.related(grads.k_rel[n])
        dbias = None if grads.bias is None else grads.bias[m][:, :, part.heads]
        given_steps = (*all_strides(own[:4]), heads), all_strides(keys), strides(symbols)
        given_tensors, rest = (own, keys, symbols, bias), (t, s, call.settings())
        filled: tuple[Any, ...] = (dq, dq_rel, dbias)
        steps: tuple[Any, ...] = (strides(dq), strides(dq_rel), heads)
        args: tuple[Any, ...] = ((*given_tensors, *filled), (*given_steps, *steps), *rest, C)
        yield Launch(backward_queries, call.tiles(t, TILE), args, *warps_stages(C, 1))
        filled = dk, dk_rel, dsymbols
        args = (*given_tensors, *filled), (*given_steps, *all_strides(filled)), *rest, replace(C, own_keys=True)
        yield Launch(backward_keys, call.tiles(s, TILE), args, *warps_stages(C, 1))
        if call.by_offset and C.reads:
            yield offsets_launch(call, above, part, dsymbols, C)


def offsets_launch(
    call: RelationalKernelCall, above: OutputGradients, part: HeadPart, dsymbols: Tensor, C: Compiled
) -> Launch:
    """The launch that fills the gradient of the symbols by offset."""
    t, s = call.q.shape[1], call.k.shape[1]
    wide = triton.next_power_of_2(2 * TILE)  # keys of a tile of queries within a tile of offsets
    sight = replace(C.sight, keys=wide)
    C = replace(C, k=replace(C.k, rows=wide), symbols=replace(C.symbols, rows=TILE), sight=sight)
    (k, _), _, bias_of = call.key_side(part)
    read = part.queries(call.q), k, bias_of, part.queries(above.dretrieved), above.softmax[:, :, part.heads], dsymbols
    steps = *all_strides((read[0], k, read[3])), call.q.shape[2], strides(dsymbols)
    args = read, steps, t, s, (pair(call.scale), call.limits), C
    return Launch(backward_offsets, call.tiles(t + s - 1, TILE), args, *warps_stages(C, 1))


def warps_stages(C: Compiled, stages: int) -> tuple[int, int]:
    """num_warps and num_stages: eight warps for full programs.  Not measured on a GPU."""
    size = max(C.q.heads_padded * C.q.width_padded, C.q_rel.heads_padded * C.q_rel.width_padded)
    return (8 if size >= WIDE // 2 else 4), stages
