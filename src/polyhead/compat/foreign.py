"""Shared by the readers of foreign models: masks that are added to scores, and taps.

Every layer of a foreign model becomes a `Taps` with one group of softmax heads, which `polyhead.analysis` reads like
ours.
"""

import json
import pathlib
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead.layers.heads.functions import code_with
from polyhead.layers.taps import GroupTaps
from polyhead.ops.readable import is_readable
from polyhead.ops.registry import code_of
from polyhead.ops.softmax.op import softmax_attention


def holds_model(folder: pathlib.Path) -> bool:
    """Whether `folder` was written by `save_pretrained` of transformers, and is not a run folder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get("model_type"), str)


def check_mask(name: str, mask: Tensor) -> None:
    """Raise ValueError unless a foreign mask is Boolean or floating."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be boolean or floating but is {mask.dtype}")


def visible(mask: Tensor) -> Bool[Tensor, "..."]:
    """Where a foreign mask, True at visible pairs or floating, masks nothing.  NaN masks nothing, so it is not lost."""
    if mask.dtype == torch.bool:
        return mask
    return ~(mask <= torch.finfo(mask.dtype).min)


def limits(
    masks: Sequence[Tensor], t: int, s: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "#b #h t s"] | None, Bool[Tensor, "..."] | None]:
    """Return our (bias, mask) from foreign masks (b|1 h|1 t|1 s): Boolean, True where a query may attend, or floating.

    Floating masks are added to the scores; -inf and the dtype's smallest number mask a pair.  A bias of zeros and a
    mask of True are None, where their numbers may be read and are not learned.
    """
    bias = mask = None
    for array in masks:
        is_visible = visible(array)
        mask = is_visible if mask is None else mask & is_visible
        if array.dtype != torch.bool:
            finite = array.masked_fill(~is_visible, 0).to(dtype).expand(*array.shape[:2], t, s)
            bias = finite if bias is None else bias + finite
    if any(array.requires_grad or not is_readable(array) for array in masks):
        return bias, mask
    if bias is not None and not bias.any():
        bias = None
    if mask is not None and mask.all():
        mask = None
    return bias, mask


def softmax_group(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    *,
    bias: Tensor | None,
    mask: Bool[Tensor, "..."] | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    w_value: Float[Tensor, "g e _"] | None = None,
    b_value: Float[Tensor, "g e"] | None = None,
    w_out: Float[Tensor, "h m e"] | None = None,
) -> GroupTaps:
    """Return the taps of a layer's softmax heads, with their output."""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    output = softmax_attention(q, k, v, bias=bias, mask=mask, scale=scale, softcap=softcap, sinks=sinks)
    return GroupTaps(
        kind="softmax",
        normalise="softmax",
        act="identity",
        depth=1,
        q=q,
        k=k,
        v=v,
        output=output.contiguous(),
        bias=bias,
        mask=mask,
        causal=False,  # foreign masks include causality
        scale=scale,
        w_value=w_value,
        b_value=b_value,
        w_out=w_out,
        value_weight=None,
        coder=partial(code_with, code_of("softmax"), {"softcap": softcap, "sinks": sinks}),
    )
