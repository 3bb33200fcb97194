"""One tile of HYLA: its code, its value networks, and their gradients; see blocked.py for the equations.

Memory order is (k b q h) for the code and (k b q e) for the pairs, so that "for every key" and "for every query" are
both plain batched matrix multiplies without a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.latent_code import softmax_dim
from polyhead.ops.tiles import (
    Buffers,
    Hidden,
    Scores,
    Tile,
    accumulate,
    activate,
    activate_backward,
    hide,
)
from polyhead.spec import RMS_HEADS_EPS, SOFTMAX_AXIS


@dataclass
class Chunk:
    """Some samples of the batch, laid out for the tiles."""

    scores: Scores
    v: Tensor  # (s b h e), contiguous
    weight: Tensor | None  # (h e e)
    normalise: str
    act: str
    tile_t: int
    tile_s: int

    @property
    def buffers(self) -> Buffers:
        return self.scores.buffers

    def rows(self) -> Iterator[slice]:
        """Tiles of queries."""
        t = self.scores.q.shape[1]
        for q0 in range(0, t, self.tile_t):
            yield slice(q0, min(q0 + self.tile_t, t))

    def code_tiles(self, rows: slice) -> Iterator[tuple[Tile, slice]]:
        """Tiles of codes, each with its place among ((b q)) rows: whole rows if keys are normalised together.

        A single sample's tiles have only those of the queries that may look at any of their keys.
        """
        reach, b = self.scores.reach, self.v.shape[1]
        first, end = reach.keys(rows.start, rows.stop)
        step = max(end - first, 1) if SOFTMAX_AXIS.get(self.normalise) == "s" else self.tile_s
        for k0 in range(first, end, step):
            k1 = min(k0 + step, end)
            near = reach.queries(k0, k1) if b == 1 else (rows.start, rows.stop)
            at = Tile(max(near[0], rows.start), min(near[1], rows.stop), k0, k1)
            yield at, slice((at.q0 - rows.start) * b, (at.q1 - rows.start) * b)

    def value_tiles(self, at: Tile) -> Iterator[Tile]:
        for k0 in range(at.k0, at.k1, self.tile_s):
            yield Tile(at.q0, at.q1, k0, min(k0 + self.tile_s, at.k1))


@dataclass
class Code:
    """The code of one tile: `a` (k b q h) with dropout, and what its backward pass needs."""

    a: Tensor
    before: Tensor  # (b h q k): masked scores, or their softmax over keys or heads
    root: Tensor | None  # (b q k): one over the root of the mean square over heads
    hidden: Hidden


def code_tile(chunk: Chunk, at: Tile) -> Code:
    """Scores, mask, normaliser, dropout."""
    scores, dim = chunk.scores, softmax_dim(chunk.normalise)
    s, hidden = scores.tile(at), scores.hidden(at)
    hide(s, hidden, 0.0 if dim is None else torch.finfo(s.dtype).min)
    if dim is not None:
        s = hide(s.softmax(dim), hidden, 0.0)
    b, h, q, k = s.shape
    a = chunk.buffers.take("code", (k, b, q, h), chunk.v.dtype)
    root = None
    if "rms_heads" in chunk.normalise:
        square = torch.mul(s, s, out=chunk.buffers.take("square", (b, h, q, k), s.dtype))
        root = square.mean(1).add_(RMS_HEADS_EPS).rsqrt_()
        torch.mul(s.permute(3, 0, 2, 1), root.permute(2, 0, 1).unsqueeze(-1), out=a)
    else:
        a.copy_(s.permute(3, 0, 2, 1))
    if scores.keep is not None:
        a.mul_(scores.keep[:, :, at.q, at.k].permute(3, 0, 2, 1))
    return Code(a, s, root, hidden)


def code_backward(chunk: Chunk, at: Tile, code: Code, da: Tensor) -> Tensor:
    """From the gradient (b h q k) of the code with dropout, overwritten, to that of the scores."""
    s, keep = code.before, chunk.scores.keep
    if keep is not None:
        da.mul_(keep[:, :, at.q, at.k])
    product = chunk.buffers.take("square", tuple(s.shape), s.dtype)
    if code.root is not None:
        mean = torch.mul(s, da, out=product).mean(1).mul_(code.root).mul_(code.root)
        da.sub_(torch.mul(s, mean.unsqueeze(1), out=product)).mul_(code.root.unsqueeze(1))
    dim = softmax_dim(chunk.normalise)
    if dim is not None:
        da.sub_(torch.mul(s, da, out=product).sum(dim, keepdim=True)).mul_(s)
    return hide(da, code.hidden, 0.0)


@dataclass
class Values:
    """The value networks of one tile: `first` and `last` layer before `act`, and after it; (k (b q) e)."""

    z: Tensor
    y: Tensor
    z2: Tensor | None
    out: Tensor


def value_tile(chunk: Chunk, a: Tensor, at: Tile) -> Values:
    """Run every pair through its network."""
    k, b, q, h = a.shape
    v = chunk.v[at.k].flatten(0, 1)
    z = chunk.buffers.take("hidden", (k * b, q, v.shape[-1]), v.dtype)
    z = torch.bmm(a.view(k * b, q, h), v, out=z).view(k, b * q, -1)
    y = activate(chunk.act, z)
    if chunk.weight is None:
        return Values(z, y, None, y)
    z2 = torch.zeros_like(z)
    flat, a = y.flatten(0, 1), a.view(-1, h)
    for head, weight in enumerate(chunk.weight):
        z2.view_as(flat).addcmul_(a[:, head : head + 1], flat @ weight.T)
    return Values(z, y, z2, activate(chunk.act, z2))


def forward_chunk(chunk: Chunk, out: Tensor) -> None:
    """Fill `out` (b t h e)."""
    for rows in chunk.rows():
        b, q, h, e = out[:, rows].shape
        total = torch.zeros(b * q, h, e, dtype=chunk.scores.stats, device=out.device)
        for at, own in chunk.code_tiles(rows):
            code = code_tile(chunk, at)
            for part in chunk.value_tiles(at):
                a = code.a[part.within(at)]
                y = value_tile(chunk, a, part).out
                accumulate(total[own], a.flatten(1, 2).permute(1, 2, 0), y.transpose(0, 1))
        out[:, rows] = total.view(b, q, h, e)


@dataclass
class Grads:
    """Where the gradients of a chunk gather, in the dtype of the statistics."""

    q: Tensor  # ((b h) t d)
    k: Tensor  # ((b h) s d)
    v: Tensor  # (s b h e), contiguous
    bias: Tensor | None
    weight: Tensor | None


def backward_chunk(chunk: Chunk, dout: Tensor, grads: Grads) -> None:
    """Add the gradients of a chunk, given that of its output (b t h e)."""
    for rows in chunk.rows():
        d = dout[:, rows].reshape(-1, *dout.shape[2:])
        for at, own in chunk.code_tiles(rows):
            code = code_tile(chunk, at)
            da = chunk.buffers.take("dcode", tuple(code.before.shape), code.before.dtype)
            for part in chunk.value_tiles(at):
                keys = part.within(at)
                value_backward(chunk, code.a[keys], part, d[own], da[..., keys], grads)
            ds = code_backward(chunk, at, code, da)
            chunk.scores.backward(at, ds, grads.q, grads.k, grads.bias)


def value_backward(chunk: Chunk, a: Tensor, at: Tile, dout: Tensor, da: Tensor, grads: Grads) -> None:
    """Write the gradient of the code of a tile to `da` (b h q k); add those of v and weight."""
    k, b, q, h = a.shape
    take, dtype, e = chunk.buffers.take, a.dtype, dout.shape[-1]
    values = value_tile(chunk, a, at)
    first = torch.bmm(dout, values.out.permute(1, 2, 0), out=take("first", (b * q, h, k), dtype))
    dy = torch.bmm(a.flatten(1, 2).transpose(0, 1), dout, out=take("dy", (b * q, k, e), dtype)).transpose(0, 1)
    dz, extra = take("dz", (k, b * q, e), dtype), None
    if values.z2 is not None:
        dy, extra = deep_backward(chunk, a, values, activate_backward(chunk.act, dy, values.z2, dz), grads)
    activate_backward(chunk.act, dy, values.z, dz)
    dz = dz.view(k * b, q, e)
    v = chunk.v[at.k].flatten(0, 1)
    second = torch.bmm(v, dz.transpose(1, 2), out=take("second", (k * b, h, q), dtype))
    torch.add(first.view(b, q, h, k).transpose(1, 2), second.view(k, b, h, q).permute(1, 2, 3, 0), out=da)
    if extra is not None:
        da.add_(extra.view(k, b, q, h).permute(1, 3, 2, 0))
    accumulate(grads.v[at.k].view(k * b, h, e), a.view(k * b, q, h).transpose(1, 2), dz)


def deep_backward(chunk: Chunk, a: Tensor, values: Values, dz: Tensor, grads: Grads) -> tuple[Tensor, Tensor]:
    """Through the second layer sum_h a_h W_h y: gradients of y (k (b q) e) and of the code ((k b q) h)."""
    assert chunk.weight is not None
    assert grads.weight is not None
    y, dz, a = values.y.flatten(0, 1), dz.flatten(0, 1), a.view(-1, a.shape[-1])
    dy, da = torch.zeros_like(y), torch.empty_like(a)
    for head, weight in enumerate(chunk.weight):
        da[:, head] = (dz * (y @ weight.T)).sum(-1)
        part = a[:, head : head + 1] * dz
        dy.addmm_(part, weight)
        grads.weight[head] += part.T @ y
    return dy.view_as(values.y), da
