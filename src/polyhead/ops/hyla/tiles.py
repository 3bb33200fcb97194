"""One tile of HYLA: its code, its value networks, and their gradients; see blocked.py for the equations.

The layout is (k b q h) for the code and (k b q e) for the pairs.  So a product per key and a product per query are both
batched matrix products without a copy.  Letters: b samples, q queries and k keys of the tile, h heads, e value width.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.latent_code import act, softmax_dim
from polyhead.ops.tiles import Tile, VisibleTiles
from polyhead.spec import RMS_HEADS_EPS, SOFTMAX_AXIS

NARROW = 16
"""The most columns with which a product is faster transposed (4 to 6 times at 4 and 8 columns, 1.4 times at 16)."""

Hidden = list[tuple[slice, Tensor]]
"""Pairs of a slice of a tile's keys and a mask of its hidden pairs; pairs of all other keys are visible."""


# ----------------------------------------------------------------------------------------------------- matrices, memory
class Buffers:
    """Memory that all tiles of a call share: taking a name again overwrites the earlier tensor of that name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        size = math.prod(shape)
        memory = self.memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self.memory[name] = torch.empty(size, dtype=dtype, device=self.device)
        return memory[:size].view(shape)


def is_narrow(x: Tensor, y: Tensor) -> bool:
    """Whether x @ y has few columns, while both other dimensions are large."""
    return y.shape[2] <= NARROW < min(x.shape[1:])


def accumulate(out: Tensor, x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    """out += alpha x @ y for (n i j) @ (n j k); `out` may have a wider dtype than the factors.

    `out` must be the sum or a view of it, never a copy: use slices and `view`.
    """
    if is_narrow(x, y):
        out.add_(torch.bmm(y.mT, x.mT).mT, alpha=alpha)
    elif out.dtype == x.dtype and out.is_contiguous():
        torch.baddbmm(out, x, y, alpha=alpha, out=out)
    else:
        out.add_(torch.bmm(x, y), alpha=alpha)


def activate(name: str, z: Tensor) -> Tensor:
    """act(z), written over z for relu, whose derivative can be computed from its result."""
    return torch.relu_(z) if name == "relu" else act(name)(z)


def activate_backward(name: str, grad: Tensor, z: Tensor, out: Tensor) -> None:
    """Write grad * act'(z) to `out`; `z` is as `activate` left it."""
    aten = torch.ops.aten
    if name == "identity":
        out.copy_(grad)
    elif name == "relu":
        aten.threshold_backward.grad_input(grad, z, 0, grad_input=out)
    elif name == "silu":
        aten.silu_backward.grad_input(grad, z, grad_input=out)
    else:
        approximate = "tanh" if name == "gelu_tanh" else "none"
        aten.gelu_backward.grad_input(grad, z, approximate=approximate, grad_input=out)


def hide(x: Tensor, hidden: Hidden, value: float) -> Tensor:
    """Set the hidden pairs of `x` (... q k) to `value`, in place."""
    for keys, is_hidden in hidden:
        x[..., keys].masked_fill_(is_hidden, value)
    return x


# --------------------------------------------------------------------------------------------------------------- scores
@dataclass
class Scores:
    """Tiles of the scores of one chunk of the batch, with their biases and masks.

    q is ((b h) t d), k is ((b h) s d).  bias, mask and keep are None or views of shape (b h t s); a bias by offset is
    (h t+s-1).
    """

    q: Tensor
    k: Tensor
    heads: int
    scale: float
    ranges: VisibleTiles
    bias: Tensor | None
    mask: Tensor | None
    keep: Tensor | None
    wide_dtype: torch.dtype  # of statistics
    buffers: Buffers

    def tile(self, tile: Tile) -> Tensor:
        """(b h q k) scores in the dtype of the statistics; the next call overwrites them."""
        q, k = self.q[:, tile.q], self.k[:, tile.k].transpose(1, 2)
        scores = self.buffers.take("scores", (q.shape[0], q.shape[1], k.shape[2]), q.dtype)
        torch.baddbmm(scores, q, k, beta=0, alpha=self.scale, out=scores)
        scores = scores.unflatten(0, (-1, self.heads)).to(self.wide_dtype)
        return scores if self.bias is None else scores.add_(self.bias_tile(self.bias, tile))

    def bias_tile(self, bias: Tensor, tile: Tile) -> Tensor:
        """(b|1 h q k) of a bias; a bias by offset is read at column j - i + t - 1."""
        if bias.ndim == 4:
            return bias[:, :, tile.q, tile.k]
        t = self.q.shape[1]
        return bias[:, tile.offsets(t)].unfold(-1, tile.k1 - tile.k0, 1).flip(-2)

    def backward(self, tile: Tile, dscores: Tensor, dq: Tensor, dk: Tensor, dbias: Tensor | None) -> None:
        """Add the gradients of q ((b h) t d), k ((b h) s d) and bias, given those of a tile of scores (b h q k)."""
        if dbias is not None and dbias.ndim == 2:
            add_offsets(dbias, dscores.sum(0), tile, self.q.shape[1])
        elif dbias is not None:
            target = dbias[:, :, tile.q, tile.k]
            target += dscores.sum_to_size(target.shape)
        by_head = dscores.flatten(0, 1).to(self.q.dtype)
        accumulate(dq[:, tile.q], by_head, self.k[:, tile.k], self.scale)
        accumulate(dk[:, tile.k], by_head.transpose(1, 2), self.q[:, tile.q], self.scale)

    def hidden(self, tile: Tile) -> Hidden:
        """The pairs of the tile that are masked, have a bias of -inf or are out of range; broadcasts to (b h q k)."""
        hidden = [(part.within(tile), self.ranges.hidden(part)) for part in self.ranges.edges(tile)]
        if self.mask is not None:
            hidden.append((slice(None), ~self.mask[:, :, tile.q, tile.k]))
        if self.bias is not None and self.bias_may_hide:
            hidden.append((slice(None), self.bias_tile(self.bias, tile) == -math.inf))
        return hidden

    @functools.cached_property
    def bias_may_hide(self) -> bool:
        """Whether the bias may hold -inf.  Only a CPU is checked; other devices would have to be waited for."""
        return self.bias is not None and (self.bias.device.type != "cpu" or bool(self.bias.isneginf().any()))


def add_offsets(grad: Tensor, dscores: Tensor, tile: Tile, t: int) -> None:
    """Add the gradient (h q k) of a tile of scores to the gradient of a bias by offset (h t+s-1), along diagonals."""
    h, q, k = dscores.shape
    n = q + k - 1
    skewed = dscores.new_zeros(h, q, n)
    # Row i starts at column q - 1 - i, so equal offsets share a column.
    diagonals = skewed.as_strided((h, q, k), (q * n, n - 1, 1), skewed.storage_offset() + q - 1)
    diagonals.copy_(dscores)
    grad[:, tile.offsets(t)] += skewed.sum(1)


# --------------------------------------------------------------------------------------------------------------- chunks
@dataclass
class HylaChunk:
    """Some samples of the batch, in the layout of the tiles."""

    scores: Scores
    v: Tensor  # (s b h e), contiguous
    normalise: str
    act: str
    tile_t: int
    tile_s: int

    @property
    def buffers(self) -> Buffers:
        return self.scores.buffers

    def query_tiles(self) -> Iterator[slice]:
        """Tiles of queries."""
        t = self.scores.q.shape[1]
        for q0 in range(0, t, self.tile_t):
            yield slice(q0, min(q0 + self.tile_t, t))

    def code_tiles(self, queries: slice) -> Iterator[tuple[Tile, slice]]:
        """Yield tiles of codes, each with its slice of the rows (b q); whole rows if keys are normalised together.

        For a single sample a tile has only queries that may attend to any of its keys.
        """
        ranges, b = self.scores.ranges, self.v.shape[1]
        first, end = ranges.keys(queries.start, queries.stop)
        step = self.tile_s
        if SOFTMAX_AXIS.get(self.normalise) == "s":
            step = max(end - first, 1)
        for k0 in range(first, end, step):
            k1 = min(k0 + step, end)
            q0, q1 = queries.start, queries.stop
            if b == 1:
                first_query, end_query = ranges.queries(k0, k1)
                q0, q1 = max(first_query, q0), min(end_query, q1)
            yield Tile(q0, q1, k0, k1), slice((q0 - queries.start) * b, (q1 - queries.start) * b)

    def value_tiles(self, tile: Tile) -> Iterator[Tile]:
        """The parts of a tile of codes whose values fit into the cache."""
        for k0 in range(tile.k0, tile.k1, self.tile_s):
            yield Tile(tile.q0, tile.q1, k0, min(k0 + self.tile_s, tile.k1))


@dataclass
class TileCode:
    """The code `a` (k b q h) of one tile, with dropout, and the tensors that its backward pass needs."""

    a: Tensor
    before: Tensor  # (b h q k): masked scores, or their softmax over keys or heads
    root: Tensor | None  # (b q k): 1 / root mean square over heads
    hidden: Hidden


def code_tile(chunk: HylaChunk, tile: Tile) -> TileCode:
    """The code of a tile: scores, mask, normalisation, dropout."""
    scores, dim = chunk.scores, softmax_dim(chunk.normalise)
    s, hidden = scores.tile(tile), scores.hidden(tile)
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
        a.mul_(scores.keep[:, :, tile.q, tile.k].permute(3, 0, 2, 1))
    return TileCode(a, s, root, hidden)


def code_backward(chunk: HylaChunk, tile: Tile, code: TileCode, da: Tensor) -> Tensor:
    """The gradient of the scores, given that of the code with dropout, `da` (b h q k), which is overwritten."""
    s, keep = code.before, chunk.scores.keep
    if keep is not None:
        da.mul_(keep[:, :, tile.q, tile.k])
    product = chunk.buffers.take("square", tuple(s.shape), s.dtype)
    if code.root is not None:
        mean = torch.mul(s, da, out=product).mean(1).mul_(code.root).mul_(code.root)
        da.sub_(torch.mul(s, mean.unsqueeze(1), out=product)).mul_(code.root.unsqueeze(1))
    dim = softmax_dim(chunk.normalise)
    if dim is not None:
        da.sub_(torch.mul(s, da, out=product).sum(dim, keepdim=True)).mul_(s)
    return hide(da, code.hidden, 0.0)


# --------------------------------------------------------------------------------------------------------------- passes
def value_tile(chunk: HylaChunk, a: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """The hidden layers of all pairs before and after the activation, both (k (b q) e)."""
    k, b, q, h = a.shape
    v = chunk.v[tile.k].flatten(0, 1)
    z = chunk.buffers.take("hidden", (k * b, q, v.shape[-1]), v.dtype)
    z = torch.bmm(a.view(k * b, q, h), v, out=z).view(k, b * q, -1)
    return z, activate(chunk.act, z)


def forward_chunk(chunk: HylaChunk, out: Tensor) -> None:
    """Fill `out` (b t h e)."""
    for queries in chunk.query_tiles():
        b, q, h, e = out[:, queries].shape
        total = torch.zeros(b * q, h, e, dtype=chunk.scores.wide_dtype, device=out.device)
        for tile, rows in chunk.code_tiles(queries):
            code = code_tile(chunk, tile)
            for part in chunk.value_tiles(tile):
                a = code.a[part.within(tile)]
                _, y = value_tile(chunk, a, part)
                accumulate(total[rows], a.flatten(1, 2).permute(1, 2, 0), y.transpose(0, 1))
        out[:, queries] = total.view(b, q, h, e)


@dataclass
class HylaGradients:
    """The gradients of a chunk, summed in the dtype of the statistics."""

    q: Tensor  # ((b h) t d)
    k: Tensor  # ((b h) s d)
    v: Tensor  # (s b h e), contiguous
    bias: Tensor | None


def backward_chunk(chunk: HylaChunk, dout: Tensor, grads: HylaGradients) -> None:
    """Add the gradients of a chunk, given that of its output (b t h e)."""
    for queries in chunk.query_tiles():
        dout_rows = dout[:, queries].reshape(-1, *dout.shape[2:])
        for tile, rows in chunk.code_tiles(queries):
            code = code_tile(chunk, tile)
            da = chunk.buffers.take("dcode", tuple(code.before.shape), code.before.dtype)
            for part in chunk.value_tiles(tile):
                keys = part.within(tile)
                value_backward(chunk, code.a[keys], part, dout_rows[rows], da[..., keys], grads)
            dscores = code_backward(chunk, tile, code, da)
            chunk.scores.backward(tile, dscores, grads.q, grads.k, grads.bias)


def value_backward(chunk: HylaChunk, a: Tensor, tile: Tile, dout: Tensor, da: Tensor, grads: HylaGradients) -> None:
    """Write the gradient of the code of a tile to `da` (b h q k); add that of the values.

    The code (k b q h) is used twice, in the output layer and in the hidden layer.  `dout` is ((b q) h e).
    """
    k, b, q, h = a.shape
    e, take = dout.shape[-1], chunk.buffers.take
    z, y = value_tile(chunk, a, tile)

    # Through the output layer, out = sum_j a y: one product per query.
    da_output = torch.bmm(dout, y.permute(1, 2, 0), out=take("da_output", (b * q, h, k), a.dtype))
    dy = torch.bmm(a.flatten(1, 2).transpose(0, 1), dout, out=take("dy", (b * q, k, e), a.dtype)).transpose(0, 1)
    dz = take("dz", (k, b * q, e), a.dtype)
    activate_backward(chunk.act, dy, z, dz)

    # Through the hidden layer, z = sum_h a v: one product per key.
    a_by_key, v = a.view(k * b, q, h), chunk.v[tile.k].flatten(0, 1)
    dz_by_key = dz.view(k * b, q, e)
    accumulate(grads.v[tile.k].view(v.shape), a_by_key.transpose(1, 2), dz_by_key)
    da_hidden = torch.bmm(v, dz_by_key.transpose(1, 2), out=take("da_hidden", (k * b, h, q), a.dtype))

    torch.add(da_output.view(b, q, h, k).transpose(1, 2), da_hidden.view(k, b, h, q).permute(1, 2, 3, 0), out=da)
