"""One tile of HYLA: its code, its value networks, and their gradients; see blocked.py for the equations.

The layout is (k b q h) for the code and (k b q e) for the pairs.  So a product per key and a product per query are both
batched matrix products without a copy.
"""

import math
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
class HylaChunk:
    """Some samples of the batch, in the layout of the tiles."""

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
        """Yield tiles of codes, each with its slice of the rows (b q); whole rows if keys are normalised together.

        For a single sample a tile has only queries that may attend to any of its keys.
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
class TileCode:
    """The code `a` (k b q h) of one tile, with dropout, and the tensors that its backward pass needs."""

    a: Tensor
    before: Tensor  # (b h q k): masked scores, or their softmax over keys or heads
    root: Tensor | None  # (b q k): 1 / root mean square over heads
    hidden: Hidden


def code_tile(chunk: HylaChunk, at: Tile) -> TileCode:
    """The code of a tile: scores, mask, normalisation, dropout."""
    scores, dim = chunk.scores, softmax_dim(chunk.normalise)
    s, hidden = scores.tile(at), scores.hidden(at)
    hide(s, hidden, 0.0 if dim is None else -math.inf)  # of an empty row the softmax is NaN, and becomes 0
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
    return TileCode(a, s, root, hidden)


def code_backward(chunk: HylaChunk, at: Tile, code: TileCode, da: Tensor) -> Tensor:
    """The gradient of the scores, given that of the code with dropout, `da` (b h q k), which is overwritten."""
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
class ValueNetworks:
    """The value networks of one tile, (k (b q) e): hidden layer before and after `act`; last layer before and after."""

    z: Tensor
    y: Tensor
    z2: Tensor | None
    out: Tensor


def value_tile(chunk: HylaChunk, a: Tensor, at: Tile) -> ValueNetworks:
    """Apply the value network of every pair."""
    k, b, q, h = a.shape
    v = chunk.v[at.k].flatten(0, 1)
    z = chunk.buffers.take("hidden", (k * b, q, v.shape[-1]), v.dtype)
    z = torch.bmm(a.view(k * b, q, h), v, out=z).view(k, b * q, -1)
    y = activate(chunk.act, z)
    if chunk.weight is None:
        return ValueNetworks(z, y, None, y)
    z2 = torch.zeros_like(z)
    flat, a = y.flatten(0, 1), a.view(-1, h)
    for head, weight in enumerate(chunk.weight):
        z2.view_as(flat).addcmul_(a[:, head : head + 1], flat @ weight.T)
    return ValueNetworks(z, y, z2, activate(chunk.act, z2))


def forward_chunk(chunk: HylaChunk, out: Tensor) -> None:
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
class HylaGradients:
    """The gradients of a chunk, summed in the dtype of the statistics."""

    q: Tensor  # ((b h) t d)
    k: Tensor  # ((b h) s d)
    v: Tensor  # (s b h e), contiguous
    bias: Tensor | None
    weight: Tensor | None


def backward_chunk(chunk: HylaChunk, dout: Tensor, grads: HylaGradients) -> None:
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


def value_backward(chunk: HylaChunk, a: Tensor, at: Tile, dout: Tensor, da: Tensor, grads: HylaGradients) -> None:
    """Write the gradient of the code of a tile to `da` (b h q k); add those of v and weight.

    The code is used in the output layer, in the hidden layer and, with a deep value network, between them.
    """
    k, b, q, h = a.shape
    values = value_tile(chunk, a, at)
    da_output, dy = output_backward(chunk, a, values.out, dout)
    dz, da_between = chunk.buffers.take("dz", (k, b * q, dout.shape[-1]), a.dtype), None
    if values.z2 is not None:
        dz2 = activate_backward(chunk.act, dy, values.z2, dz)
        dy, da_between = deep_backward(chunk, a, values, dz2, grads)
    activate_backward(chunk.act, dy, values.z, dz)
    da_hidden = hidden_backward(chunk, a, at, dz, grads)
    torch.add(da_output.view(b, q, h, k).transpose(1, 2), da_hidden.view(k, b, h, q).permute(1, 2, 3, 0), out=da)
    if da_between is not None:
        da.add_(da_between.view(k, b, q, h).permute(1, 3, 2, 0))


def output_backward(chunk: HylaChunk, a: Tensor, y: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Through out = sum_j a y: gradients of the code ((b q) h k) and of y (k (b q) e), given dout ((b q) h e)."""
    (k, b, q, h), e, take = a.shape, dout.shape[-1], chunk.buffers.take
    da = torch.bmm(dout, y.permute(1, 2, 0), out=take("da_output", (b * q, h, k), a.dtype))
    dy = torch.bmm(a.flatten(1, 2).transpose(0, 1), dout, out=take("dy", (b * q, k, e), a.dtype))
    return da, dy.transpose(0, 1)


def hidden_backward(chunk: HylaChunk, a: Tensor, at: Tile, dz: Tensor, grads: HylaGradients) -> Tensor:
    """Through z = sum_h a v: the gradient of the code ((k b) h q), given dz (k (b q) e); adds that of v."""
    k, b, q, h = a.shape
    a, v, dz = a.view(k * b, q, h), chunk.v[at.k].flatten(0, 1), dz.view(k * b, q, -1)
    accumulate(grads.v[at.k].view(v.shape), a.transpose(1, 2), dz)
    return torch.bmm(v, dz.transpose(1, 2), out=chunk.buffers.take("da_hidden", (k * b, h, q), a.dtype))


def deep_backward(
    chunk: HylaChunk, a: Tensor, values: ValueNetworks, dz: Tensor, grads: HylaGradients
) -> tuple[Tensor, Tensor]:
    """Through the second layer sum_h a_h W_h y: gradients of y (k (b q) e) and of the code ((k b q) h); adds that of
    W."""
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
