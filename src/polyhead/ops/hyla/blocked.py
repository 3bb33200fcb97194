"""HYLA tile by tile: memory grows with t, not with t^2, and the backward pass recomputes what it needs.

One tile holds some queries i and keys j of all heads; a is its code, with dropout.

    forward    z_ij = sum_h a_hij v_jh            y = act(z)              out_ih += sum_j a_hij y_ij
    backward   dy_ij = sum_h a_hij dout_ih        dz = dy act'(z)         da_hij = dout_ih . y_ij + dz_ij . v_jh
               dv_jh += sum_i a_hij dz_ij         ds = da through the normaliser, then dq, dk and dbias as everywhere
    rms        a = c s,  c = (mean_h s^2 + eps)^(-1/2)                    ds = c (da - a mean_h(a da))
    softmax    ds = a (da - sum a da) over keys j (a tile of codes holds whole rows, read in pieces) or heads h

Only the arguments are saved.  The scores are normalised before they meet a value, with statistics in at least
float32: pulling the normaliser out of relu would save a multiply per pair but is infinite at masked pairs in half
precision.  What happens within a tile is in tiles.py.  Schug et al. 2024, "Attention as a hypernetwork",
eq. 6 and 10.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.custom_op_rules import (
    REFERENCES,
    backward_only,
    by_reference,
    check_backward,
    no_second_derivative,
    vmapped,
)
from polyhead.ops.hyla.tiles import Chunk, Grads, backward_chunk, forward_chunk
from polyhead.ops.latent_code import Inputs, share, wide
from polyhead.ops.tiles import Buffers, Reach, Scores, given, refuse
from polyhead.spec import ACTS, NORMALISE, SOFTMAX_AXIS
from polyhead.spec.shapes import one_of

QUERIES, KEYS = 191, 48
"""Pairs of one tile of values, at most.

Queries come in shares of odd size: with 192, what one query reads of all keys falls into one place of the cache.
"""

PAIRS = 1 << 17
"""Numbers in one tile of values over a chunk of the batch, at most (beyond a single sample)."""

ROWS = 1 << 20
"""Numbers in one tile of whole rows of codes, at most (beyond a single row)."""


def refusal(inputs: Inputs) -> str | None:
    """Why tiles cannot take the inputs, or None: of what the reference takes, derivatives that custom ops lack."""
    return backward_only(inputs)


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
    twice: bool = False,
) -> Tensor:
    """HYLA by tiles.  Gradients for q, k, v, bias and value_weight; a second derivative by the reference if `twice`,
    else it is refused."""
    one_of("hyla", "normalise", normalise, NORMALISE)
    one_of("hyla", "act", act, ACTS)
    refuse("hyla", "blocked", refusal(Inputs(q, k, v, keep=keep)))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    absent = q.new_empty(0)
    limits = [absent if x is None else x for x in (bias, value_weight, mask, keep, cu_seqlens)]
    options = {"causal": causal, "window": window, "scale": scale, "normalise": normalise, "act": act}
    return torch.ops.polyhead.hyla_blocked([q, k, v, *limits[:2]], limits[2:], **options, twice=twice)


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
    twice: bool = False,
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
def _(tensors, limits, *, causal, window=None, scale, normalise, act, twice=False):  # type: ignore[no-untyped-def]
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
    dq, dk, dv = (q.new_zeros(size, dtype=wider) for size in ((b, h, t, d), (b, h, s, d), (b, s, h, e)))
    dbias, dweight = torch.zeros_like(bias, dtype=wider), torch.zeros_like(weight, dtype=wider)
    with torch.autocast(q.device.type, enabled=False):
        for part, chunk in chunks([q, k, v], optional, Options(causal, window, scale, normalise, act)):
            dlimit = None if bias.numel() == 0 else dbias if bias.ndim == 2 or bias.shape[0] == 1 else dbias[part]
            rows = dq[part].view(chunk.scores.q.shape), dk[part].view(chunk.scores.k.shape)
            grads = Grads(*rows, dq.new_zeros(chunk.v.shape), dlimit, dweight)
            backward_chunk(chunk, dout[part].to(chunk.v.dtype), grads)
            dv[part] = grads.v.transpose(0, 1)
    groups = k.shape[2]
    dk, dv = (x.unflatten(2, (groups, -1)).sum(3) for x in (dk.transpose(1, 2), dv))
    grad = zip((dq.transpose(1, 2), dk, dv, dbias, dweight), tensors, strict=True)
    return [x.to(like.dtype, memory_format=torch.contiguous_format, copy=True) for x, like in grad]


@_backward.register_fake
def _(dout, tensors, limits, *, causal, window=None, scale, normalise, act):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _grad(ctx, dout):  # type: ignore[no-untyped-def]
    check_backward("hyla", "blocked")
    saved = list(ctx.saved_tensors)  # once: checkpointing unpacks them once only
    tensors, limits, options = saved[:5], saved[5:], dict(ctx.options)
    if options.pop("twice", False) and torch.is_grad_enabled():
        grads = by_reference(lambda own: [_anew(own, limits, options)], tensors, [dout])
    else:
        grads = torch.ops.polyhead.hyla_blocked_backward(dout, tensors, limits, **options)
    return grads, [None] * len(limits)


def _anew(tensors: list[Tensor], limits: list[Tensor], options: dict[str, Any]) -> Tensor:
    """The forward pass by the reference."""
    bias, weight, mask, keep, cu_seqlens = given([*tensors[3:], *limits])
    extra = {"bias": bias, "value_weight": weight, "mask": mask, "keep": keep, "cu_seqlens": cu_seqlens}
    return REFERENCES["hyla"](*tensors[:3], **extra, **options)


_forward.register_autograd(_grad, setup_context=_setup)
_backward.register_autograd(no_second_derivative("hyla", "blocked"))
_forward.register_vmap(vmapped(_forward))
