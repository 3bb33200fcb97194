"""Shared by the readers of foreign models: the check of a folder, keys, masks that are added to scores, and taps;
and by the writers of foreign formats: the check of heads.

Every layer of a foreign model becomes a `Taps` with one group of softmax heads, which `polyhead.analysis` reads like
ours.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.heads.functions import compiled, is_own
from polyhead.layers.taps import GroupTaps
from polyhead.ops.dispatch import code_of
from polyhead.ops.softmax.reference import softmax_attention


def holds_model(folder: pathlib.Path) -> bool:
    """Whether `folder` was written by `save_pretrained` of transformers, and is not a run folder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get("model_type"), str)


def uncompiled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the prefix `_orig_mod.` that torch.compile adds to keys, of a model or of its parts."""
    return {key.replace("_orig_mod.", ""): value for key, value in state.items()}


def tensor_of(name: str, value: Any) -> Tensor:
    """Return a copy of a parameter as a tensor: of PyTorch, NumPy or JAX, in bfloat16, too.

    Raises ValueError for anything else.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    array = np.array(value)
    if array.dtype.name == "bfloat16":  # a dtype of ml_dtypes, which torch does not read
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} must be an array of numbers, got {type(value).__name__} of {array.dtype}")
    return torch.from_numpy(array)


def check_functions(who: str, model: nn.Module) -> None:
    """Raise ValueError for heads that compute a user's function: a foreign format holds parameters only."""
    for layer in model.modules():
        for group in layer.groups if isinstance(layer, MultiHeadAttention) else ():
            if is_own(group):
                name = type(compiled(group)).__name__
                raise ValueError(f"{who}: {name} must compute the op of their kind but compute a user's function")


def unread(x: Tensor) -> bool:
    """Whether numbers cannot be read: in compiled code and on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta


def check_mask(what: str, mask: Tensor) -> None:
    """Raise ValueError unless a foreign mask, `what`, is Boolean or floating."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{what} must be boolean or floating but is {mask.dtype}")


def shown(mask: Tensor) -> Bool[Tensor, "..."]:
    """Where a foreign mask does not mask a pair.  NaN masks nothing, so it is not lost."""
    return mask if mask.dtype == torch.bool else ~(mask <= torch.finfo(mask.dtype).min)


def limits(
    given: Sequence[Tensor], t: int, s: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "#b #h t s"] | None, Bool[Tensor, "..."] | None]:
    """Our (bias, mask) from foreign masks (b|1 h|1 t|1 s): Boolean, True where a query may attend, or floating.

    Floating masks are added to the scores; -inf and the dtype's smallest number mask a pair.  A bias of zeros and a
    mask of True are None, unless the numbers are `unread` or a mask is learned.
    """
    bias = mask = None
    for array in given:
        look = shown(array)
        mask = look if mask is None else mask & look
        if array.dtype != torch.bool:
            added = array.masked_fill(~look, 0).to(dtype).expand(*array.shape[:2], t, s)
            bias = added if bias is None else bias + added
    if any(unread(array) or array.requires_grad for array in given):
        return bias, mask
    return bias if bias is not None and bias.any() else None, mask if mask is not None and not mask.all() else None


def softmax_group(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    *,
    bias: Tensor | None,
    mask: Bool[Tensor, "..."] | None,
    scale: float | None = None,
    w_value: Float[Tensor, "g e _"] | None = None,
    b_value: Float[Tensor, "g e"] | None = None,
    w_out: Float[Tensor, "h m e"] | None = None,
) -> GroupTaps:
    """The taps of a layer's softmax heads, with their output."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return GroupTaps(
        kind="softmax",
        normalise="softmax",
        act="identity",
        depth=1,
        q=q,
        k=k,
        v=v,
        output=softmax_attention(q, k, v, bias=bias, mask=mask, scale=scale).contiguous(),
        bias=bias,
        mask=mask,
        causal=False,  # foreign masks include causality
        scale=scale,
        w_value=w_value,
        b_value=b_value,
        w_out=w_out,
        value_weight=None,
        coder=code_of("softmax"),
    )
