"""The Haiku parameters of the tutorial's multi-head attention as a PyTorch layer, and back.

    params["mha/~/linear"]["w"] (in, out), ["b"] (out,)      queries        -> rows of qkv: w.T
    params["mha/~/linear_1"], params["mha/~/linear_2"]       keys, values
    params["mha/~/linear_3"]                                 output         -> out: w.T

Arrays are NumPy's or JAX's; neither Haiku nor JAX is imported.  Two differences remain.  Our layer reads keys and
values from one tensor, of the width of the queries.  For a query without a visible key it returns the output bias; the
tutorial averages all values, because it fills masked scores with -1e9.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Integer
from numpy.typing import NDArray
from torch import Tensor

from polyhead.compat.mapping import check_functions, tensor_of, uncompiled
from polyhead.config import Softmax
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.device import Device
from polyhead.layers.heads.groups import SoftmaxHeads

LINEARS = ("linear", "linear_1", "linear_2", "linear_3")
Params = Mapping[str, Mapping[str, Any]]


def from_haiku(params: Params, *, heads: int, name: str | None = None, device: Device = None) -> MultiHeadAttention:
    """Return the layer whose parameters are `params`: `MultiHeadAttention(dim, [Softmax(heads)], bias=True)`.

    Args:
        name: The module's name in `params` ("mha", "encoder/~/mha"), needed if there are several modules.

    Raises:
        ValueError: For missing linears, an unknown name, and shapes that do not match.
    """
    state = to_state_dict(params, name=name)
    dim = len(state["out.weight"])
    if heads < 1 or dim % heads:
        raise ValueError(f"from_haiku: the number of heads must divide the width {dim} but is {heads}")
    dtype = state["out.weight"].dtype
    attention = MultiHeadAttention(dim, [Softmax(heads)], bias=True, device="meta", dtype=dtype)
    attention = attention.to_empty(device=device or "cpu")
    attention.load_state_dict(state)
    return attention


def to_state_dict(params: Params, *, name: str | None = None) -> dict[str, Tensor]:
    """Return the state dict of `from_haiku`'s layer, copied."""
    prefix = _prefix(params, name)
    weights, biases = [], []
    for linear in LINEARS:
        entry = params.get(f"{prefix}{linear}")
        if entry is None or set(entry) != {"w", "b"}:
            names = "nothing" if entry is None else ", ".join(sorted(entry))
            raise ValueError(f"from_haiku: {prefix}{linear} must hold w and b but holds {names}")
        weights.append(tensor_of(f"from_haiku: {prefix}{linear} w", entry["w"]).T)
        biases.append(tensor_of(f"from_haiku: {prefix}{linear} b", entry["b"]))

    dim = len(weights[-1])
    for linear, weight, bias in zip(LINEARS, weights, biases, strict=True):
        if weight.shape != (dim, dim) or bias.shape != (dim,):
            shapes = f"w {tuple(weight.T.shape)} and b {tuple(bias.shape)}"
            raise ValueError(f"from_haiku: {prefix}{linear} must be w ({dim}, {dim}) and b ({dim},) but is {shapes}")
    return {
        "qkv.weight": torch.cat(weights[:3]),
        "qkv.bias": torch.cat(biases[:3]),
        "out.weight": weights[3].contiguous(),
        "out.bias": biases[3],
    }


def _prefix(params: Params, name: str | None) -> str:
    """What stands before the names of the linears of the module `name`, or of the only module."""
    prefixes = {}
    for key in sorted(params):
        module, _, linear = key.rpartition("/")
        if linear == "linear_3":
            prefixes[module.removesuffix("/~")] = key.removesuffix("linear_3")
    if name is None and len(prefixes) == 1:
        return next(iter(prefixes.values()))
    if name in prefixes:
        return prefixes[name]
    if not prefixes:
        names = ", ".join(sorted(params)) or "nothing"
        raise ValueError(f"from_haiku: params must hold a linear_3 but hold {names}")
    choice = "several modules" if name is None else f"no module {name!r}"
    raise ValueError(f"from_haiku: params hold {choice}; give name= one of {', '.join(prefixes)}")


def to_haiku(attention: MultiHeadAttention, *, name: str = "mha") -> dict[str, dict[str, NDArray[Any]]]:
    """Return the tutorial's parameters of `attention`, copied: the inverse of `from_haiku`; bfloat16 as float32.

    Raises:
        ValueError: For all but one group of softmax heads of width / heads with biases, and for positions, q/k norms, a
            window, a causal mask or a user's function.
    """
    check_functions("to_haiku", attention)
    dim = attention.dim
    is_softmax = len(attention.groups) == 1 and isinstance(attention.groups[0], SoftmaxHeads)
    has_positions = attention.rotary is not None or attention.relative is not None
    has_limits = attention.window is not None or attention.causal
    requirements = {
        f"one group of softmax heads that share the width {dim}": is_softmax and attention.widths == [dim] * 3,
        "biases": attention.qkv.bias is not None,
        "no positions, q/k norms, window or causal mask": not (
            has_positions or has_limits or attention.qk_norms is not None
        ),
    }
    for requirement, is_met in requirements.items():
        if not is_met:
            raise ValueError(f"to_haiku: attention must have {requirement}, as the tutorial's module has")

    state = uncompiled(attention.state_dict())
    weights = [*state["qkv.weight"].split(dim), state["out.weight"]]
    biases = [*state["qkv.bias"].split(dim), state["out.bias"]]
    params = {}
    for linear, weight, bias in zip(LINEARS, weights, biases, strict=True):
        params[f"{name}/~/{linear}"] = {"w": _array(weight.T), "b": _array(bias)}
    return params


def _array(parameter: Tensor) -> NDArray[Any]:
    """A copy in NumPy, which has no bfloat16: as float32."""
    if parameter.dtype == torch.bfloat16:
        parameter = parameter.float()
    return parameter.cpu().numpy().copy()


def from_haiku_mask(mask: Integer[np.ndarray, "..."] | Bool[np.ndarray, "..."]) -> Bool[Tensor, "b 1 t s"]:
    """Return the tutorial's mask (B, 1, S), (B, S, S) or (1, S, S), in which 0 hides, as our Boolean mask.

    Raises:
        ValueError: For other ranks, which the tutorial's module handles wrongly or refuses.
    """
    array = np.asarray(mask)
    if array.ndim != 3:
        raise ValueError(f"from_haiku_mask: mask must be (b t s) or (b 1 s) but has shape {array.shape}")
    return torch.tensor(array != 0)[:, None]
