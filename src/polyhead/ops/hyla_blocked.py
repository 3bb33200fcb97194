"""HYLA tile by tile: memory grows with t, not with t^2, and the backward pass recomputes what it needs.

One tile holds some queries i and keys j of all heads; a is its code, with dropout.

    forward    z_ij = sum_h a_hij v_jh            y = act(z)              out_ih += sum_j a_hij y_ij
    backward   dy_ij = sum_h a_hij dout_ih        dz = dy act'(z)         da_hij = dout_ih . y_ij + dz_ij . v_jh
               dv_jh += sum_i a_hij dz_ij         ds = da through the normaliser, then dq, dk and dbias as everywhere
    rms        a = c s,  c = (mean_h s^2 + eps)^(-1/2)                    ds = c (da - a mean_h(a da))
    softmax    ds = a (da - sum a da) over keys j (a tile of codes holds whole rows, read in pieces) or heads h

Only the arguments are saved.  The scores are normalised before they meet a value, with statistics in at least
float32: pulling the normaliser out of relu would save a multiply per pair but is infinite at masked pairs in half
precision.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6 and 10.

Memory order is (k b q h) for the code and (k b q e) for the pairs, so that "for every key" and "for every query" are
both plain batched matrix multiplies without a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.code import Inputs, share, softmax_dim, wide
from polyhead.ops.tiles import (
    Buffers,
    Hidden,
    Reach,
    Scores,
    Tile,
    accumulate,
    activate,
    activate_backward,
    given,
    hide,
)
from polyhead.ops.tiles_ops import no_second_derivative, vmapped
from polyhead.shapes import one_of
from polyhead.spec import ACTS, NORMALISE, RMS_HEADS_EPS, SOFTMAX_AXIS

QUERIES, KEYS = 191, 48
"""Pairs of one tile of values, at most.

Queries come in shares of odd size: with 192, what one query reads of all keys falls into one place of the cache.
"""

PAIRS = 1 << 17
"""Numbers in one tile of values over a chunk of the batch, at most (beyond a single sample)."""

ROWS = 1 << 20
"""Numbers in one tile of whole rows of codes, at most (beyond a single row)."""


def refusal(inputs: Inputs) -> str | None:
    """Tiles take everything the reference takes."""
    return None


def worth(inputs: Inputs) -> bool:
    """Is it measured to be no slower than the reference?

    Whole training steps of the fuzzy-logic model (`benchmarks/bench_training.py` with the impl named), one core: the
    reference takes 26 ms and tiles 31 at 2^16 pairs b t s (d = 8), 56 and 67 at 2^17 (d = 2).  Forward and backward
    of the op alone at 2^18 pairs, reference over tiles: 2.4 with rms over heads (causal), 1.0 with softmax.
    """
    return inputs.q.shape[0] * inputs.q.shape[1] * inputs.k.shape[1] >= 1 << 18


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    normalise: str = "rms_heads",
    act: str = "relu",
    value_weight: Tensor | None = None,
) -> Tensor:
    """HYLA by tiles.  Gradients for q, k, v, bias and value_weight; a second derivative is refused."""
    one_of("hyla", "normalise", normalise, NORMALISE)
    one_of("hyla", "act", act, ACTS)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    absent = q.new_empty(0)
    limits = [absent if x is None else x for x in (bias, value_weight, mask, keep, cu_seqlens)]
    options = {"causal": causal, "window": window, "scale": scale, "normalise": normalise, "act": act}
    return torch.ops.polyhead.hyla_blocked([q, k, v, *limits[:2]], limits[2:], **options)


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
    v: Tensor  # (s b h e)
    bias: Tensor | None
    weight: Tensor


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
    accumulate(grads.v[at.k].flatten(0, 1), a.view(k * b, q, h).transpose(1, 2), dz)


def deep_backward(chunk: Chunk, a: Tensor, values: Values, dz: Tensor, grads: Grads) -> tuple[Tensor, Tensor]:
    """Through the second layer sum_h a_h W_h y: gradients of y (k (b q) e) and of the code ((k b q) h)."""
    assert chunk.weight is not None
    y, dz, a = values.y.flatten(0, 1), dz.flatten(0, 1), a.view(-1, a.shape[-1])
    dy, da = torch.zeros_like(y), torch.empty_like(a)
    for head, weight in enumerate(chunk.weight):
        da[:, head] = (dz * (y @ weight.T)).sum(-1)
        part = a[:, head : head + 1] * dz
        dy.addmm_(part, weight)
        grads.weight[head] += part.T @ y
    return dy.view_as(values.y), da


# ---------------------------------------------------------------------------------------------------- chunks of a call
@dataclass(frozen=True)
class Options:
    """What is not a tensor."""

    causal: bool
    window: int | None
    scale: float
    normalise: str
    act: str


def sizes(b: int, h: int, t: int, s: int, e: int, whole_rows: bool) -> tuple[int, int, int]:
    """(samples per chunk, queries per tile, keys per tile of values)."""
    most = max(1, min(QUERIES, ROWS // max(1, h * s)) if whole_rows else QUERIES)
    tile_t = -(-t // max(1, -(-t // most))) | 1
    tile_s = max(1, min(KEYS, s))
    return max(1, min(b, PAIRS // max(1, min(tile_t, t) * tile_s * max(h, e)))), tile_t, tile_s


def chunks(tensors: list[Tensor], limits: list[Tensor | None], options: Options) -> Iterator[tuple[slice, Chunk]]:
    """The batch in pieces whose tiles stay in cache, each laid out for its matrix multiplies."""
    q, k, v = tensors
    bias, weight, mask, keep, cu_seqlens = limits
    (b, t, h, _), s, e = q.shape, k.shape[1], v.shape[-1]
    stats = wide(q).dtype if q.numel() else torch.float32
    # CPUs multiply half precision no faster than float32; there all work is done in the wider type.
    work = stats if q.device.type == "cpu" else q.dtype
    q, k, v = q.to(work), share(k.to(work), h), share(v.to(work), h)
    step, tile_t, tile_s = sizes(b, h, t, s, e, SOFTMAX_AXIS.get(options.normalise) == "s")
    by_offset = bias is not None and bias.ndim == 2
    full = [None if x is None else x.expand(b, h, t, s) for x in (None if by_offset else bias, mask, keep)]
    buffers = Buffers(q.device)
    reach = Reach(t, s, q.device, causal=options.causal, window=options.window, cu_seqlens=cu_seqlens)
    for b0 in range(0, b, step):
        part = slice(b0, min(b0 + step, b))
        queries, keys = (x[part].transpose(1, 2).flatten(0, 1) for x in (q, k))
        own = [None if x is None else x[part] for x in full]
        own[0] = bias if by_offset else own[0]
        scores = Scores(queries, keys, h, options.scale, reach, own[0], own[1], own[2], stats, buffers)
        rows = v[part].transpose(0, 1).contiguous()
        heads = None if weight is None else weight.to(work)
        yield part, Chunk(scores, rows, heads, options.normalise, options.act, tile_t, tile_s)


@torch.library.custom_op("polyhead::hyla_blocked", mutates_args=())
def _forward(
    tensors: list[Tensor],
    limits: list[Tensor],
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    normalise: str,
    act: str,
) -> Tensor:
    """Of q, k, v, bias, weight; mask, keep, cu_seqlens."""
    q, _, v, *rest = tensors
    options = Options(causal, window, scale, normalise, act)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        for part, chunk in chunks(tensors[:3], given([*rest, *limits]), options):
            forward_chunk(chunk, out[part])
    return out


@_forward.register_fake
def _(tensors, limits, *, causal, window=None, scale, normalise, act):  # type: ignore[no-untyped-def]
    return tensors[0].new_empty(*tensors[0].shape[:3], tensors[2].shape[-1])


@torch.library.custom_op("polyhead::hyla_blocked_backward", mutates_args=())
def _backward(
    dout: Tensor,
    tensors: list[Tensor],
    limits: list[Tensor],
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    normalise: str,
    act: str,
) -> list[Tensor]:
    """Gradients of q, k, v, bias and weight; empty for those that are not given."""
    q, k, v, bias, weight = tensors
    optional = given([bias, weight, *limits])
    (b, t, h, d), s, e = q.shape, k.shape[1], v.shape[-1]
    wider = wide(q).dtype
    dq, dk, dv = (q.new_zeros(size, dtype=wider) for size in ((b, h, t, d), (b, h, s, d), (s, b, h, e)))
    dbias, dweight = torch.zeros_like(bias, dtype=wider), torch.zeros_like(weight, dtype=wider)
    with torch.autocast(q.device.type, enabled=False):
        for part, chunk in chunks([q, k, v], optional, Options(causal, window, scale, normalise, act)):
            dlimit = None if bias.numel() == 0 else dbias if bias.ndim == 2 or bias.shape[0] == 1 else dbias[part]
            grads = Grads(dq[part].flatten(0, 1), dk[part].flatten(0, 1), dv[:, part], dlimit, dweight)
            backward_chunk(chunk, dout[part].to(chunk.v.dtype), grads)
    groups = k.shape[2]
    dk, dv = (x.unflatten(2, (groups, -1)).sum(3) for x in (dk.transpose(1, 2), dv.transpose(0, 1)))
    grad = zip((dq.transpose(1, 2), dk, dv, dbias, dweight), tensors, strict=True)
    return [x.to(like.dtype, memory_format=torch.contiguous_format, copy=True) for x, like in grad]


@_backward.register_fake
def _(dout, tensors, limits, *, causal, window=None, scale, normalise, act):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _grad(ctx, dout):  # type: ignore[no-untyped-def]
    saved = list(ctx.saved_tensors)  # once: checkpointing unpacks them once only
    tensors, limits = saved[:5], saved[5:]
    return torch.ops.polyhead.hyla_blocked_backward(dout, tensors, limits, **ctx.options), [None] * len(limits)


_forward.register_autograd(_grad, setup_context=_setup)
_backward.register_autograd(no_second_derivative("hyla", "blocked"))
_forward.register_vmap(vmapped(_forward))
