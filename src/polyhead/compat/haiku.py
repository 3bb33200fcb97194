"""The multi-head attention of the tutorial "Yet Another (JAX) Transformer": its Haiku parameters, both ways.

    params["mha/~/linear"]["w"] (in, out), ["b"] (out,)      queries        -> rows of qkv: w.T
    params["mha/~/linear_1"], params["mha/~/linear_2"]       keys, values
    params["mha/~/linear_3"]                                 output         -> out: w.T

NumPy arrays in, NumPy arrays out: neither haiku nor jax is imported.

One difference of meaning remains: where a query may look nowhere the tutorial, which fills with -1e9, averages all
values; polyhead gives the output bias alone.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Integer
from numpy.typing import NDArray
from torch import Tensor

from polyhead.config import Softmax
from polyhead.layers import Device
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.heads import SoftmaxHeads

LINEARS = ("linear", "linear_1", "linear_2", "linear_3")
Params = Mapping[str, Mapping[str, Any]]


def from_haiku(params: Params, *, heads: int, name: str | None = None, device: Device = None) -> MultiHeadAttention:
    """The module whose parameters are `params`: `MultiHeadAttention(dim, [Softmax(heads)], bias=True)`.

    `name` is the module's name in `params` ("mha", "encoder/~/mha"), needed where there are several.

    Raises ValueError for missing linears, a name that is not there, and shapes that do not fit.
    """
    state = to_state_dict(params, name=name)
    dim = state["out.weight"].shape[0]
    if heads < 1 or dim % heads:
        raise ValueError(f"from_haiku: the number of heads must divide the width {dim} but is {heads}")
    attention = MultiHeadAttention(dim, [Softmax(heads)], bias=True, device="meta", dtype=state["out.weight"].dtype)
    attention = attention.to_empty(device="cpu" if device is None else device)
    attention.load_state_dict(state)
    return attention


def to_state_dict(params: Params, *, name: str | None = None) -> dict[str, Tensor]:
    """The state dict of `from_haiku`'s module."""
    prefix = _prefix(params, name)
    weights, biases = [], []
    for linear in LINEARS:
        entry = params.get(f"{prefix}{linear}")
        if entry is None or set(entry) != {"w", "b"}:
            came = "nothing" if entry is None else ", ".join(sorted(entry))
            raise ValueError(f"from_haiku: {prefix}{linear} must hold w and b but holds {came}")
        weights.append(torch.tensor(np.array(entry["w"])).T)
        biases.append(torch.tensor(np.array(entry["b"])))
    dim = weights[-1].shape[0]
    for linear, weight, bias in zip(LINEARS, weights, biases, strict=True):
        if tuple(weight.shape) != (dim, dim) or tuple(bias.shape) != (dim,):
            shapes = f"w {tuple(weight.T.shape)} and b {tuple(bias.shape)}"
            raise ValueError(f"from_haiku: {prefix}{linear} must be w ({dim}, {dim}) and b ({dim},) but is {shapes}")
    return {
        "qkv.weight": torch.cat(weights[:3]),
        "qkv.bias": torch.cat(biases[:3]),
        "out.weight": weights[3].contiguous(),
        "out.bias": biases[3],
    }


def _prefix(params: Params, name: str | None) -> str:
    found = sorted(key.removesuffix("linear_3") for key in params if key.rpartition("/")[2] == "linear_3")
    names = [prefix.removesuffix("/~/").removesuffix("/") for prefix in found]
    if name is None and len(found) == 1:
        return found[0]
    if name not in names:
        wanted = "a linear_3" if name is None and not found else f"one of {', '.join(names)}" if names else f"{name!r}"
        came = f"the name {name!r}" if name is not None and names else f"only {', '.join(sorted(params)) or 'nothing'}"
        raise ValueError(f"from_haiku: wanted {wanted} but there is {came}")
    return found[names.index(name)]


def to_haiku(attention: MultiHeadAttention, *, name: str = "mha") -> dict[str, dict[str, NDArray[Any]]]:
    """The tutorial's parameters of `attention`, copied: the inverse of `from_haiku`.

    Raises ValueError unless it is one group of softmax heads with biases, of width / heads each.
    """
    group, dim = attention.groups[0], attention.dim
    plain = len(attention.groups) == 1 and isinstance(group, SoftmaxHeads) and attention.widths == [dim] * 3
    for wanted, right in (
        (f"one group of softmax heads that share the width {dim}", plain),
        ("biases", attention.qkv.bias is not None),
        ("no positions, q/k norms, window or causal mask", not _extras(attention)),
    ):
        if not right:
            raise ValueError(
                f"to_haiku: the tutorial's module has {wanted} but this one has not: {_summary(attention)}"
            )
    weights = (*attention.qkv.weight.detach().chunk(3), attention.out.weight.detach())
    biases = (*attention.qkv.bias.detach().chunk(3), attention.out.bias.detach())
    return {
        f"{name}/~/{linear}": {"w": weight.T.cpu().numpy().copy(), "b": bias.cpu().numpy().copy()}
        for linear, weight, bias in zip(LINEARS, weights, biases, strict=True)
    }


def _extras(attention: MultiHeadAttention) -> bool:
    positions = attention.rotary is not None or attention.relative is not None
    return positions or attention.qk_norms is not None or attention.window is not None or attention.causal


def _summary(attention: MultiHeadAttention) -> str:
    groups = ", ".join(type(group).__name__ for group in attention.groups)
    return f"width {attention.dim}, {groups}, bias {attention.qkv.bias is not None}, causal {attention.causal}"


def from_haiku_mask(mask: Integer[np.ndarray, "..."] | Bool[np.ndarray, "..."]) -> Bool[Tensor, "b 1 t s"]:
    """The tutorial's mask (B, 1, S), (B, S, S) or (1, S, S), in which any nonzero number attends, as ours: True
    attends.

    Raises ValueError for other ranks, which the tutorial's module takes wrongly or not at all.
    """
    array = np.asarray(mask)
    if array.ndim != 3:
        raise ValueError(f"from_haiku_mask: mask must be (b t s) or (b 1 s) but has shape {array.shape}")
    return torch.tensor(array != 0)[:, None]


def to_haiku_mask(mask: Bool[Tensor, "b 1 t s"]) -> Integer[np.ndarray, "b t s"]:
    """The inverse of `from_haiku_mask`: 1 attends, 0 does not."""
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.dtype != torch.bool:
        raise ValueError(f"to_haiku_mask: mask must be boolean (b 1 t s) but is {mask.dtype} {tuple(mask.shape)}")
    return mask[:, 0].cpu().numpy().astype(np.int32)
