"""Shared by the readers of foreign models: masks, which are Boolean or added to scores, and folders of models."""

import json
import pathlib
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyhead.ops.readable import is_readable


def holds_model(folder: pathlib.Path) -> bool:
    """Whether `folder` was written by `save_pretrained` of transformers, and is not a run folder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get("model_type"), str)


def visible(mask: Tensor) -> Bool[Tensor, "..."]:
    """Where a foreign mask, True at visible pairs or floating, masks nothing.  NaN masks nothing, so it is not lost."""
    if mask.dtype == torch.bool:
        return mask
    return ~(mask <= torch.finfo(mask.dtype).min)


def limits(
    masks: Sequence[Tensor], t: int, s: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "#b #h t s"] | None, Bool[Tensor, "..."] | None]:
    """Return our (bias, mask) from foreign masks (b|1 h|1 t|1 s).

    Args:
        masks: Boolean, True where a query may attend, or floating.  Floating masks are added to the scores; -inf and
            the dtype's smallest number mask a pair.
        dtype: That of the bias.

    Returns:
        A bias of zeros and a mask of True are None, where their numbers may be read and are not learned.
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
