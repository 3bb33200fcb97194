"""The multi-head attention of the tutorial "Yet Another (JAX) Transformer": its Haiku parameters, both ways.

spec/haiku_tree.py has the mapping of names.  Arrays are NumPy arrays: neither haiku nor jax is imported.

One difference remains: for a query without a visible key, the tutorial averages all values, because it fills masked
scores with -1e9.  polyhead returns the output bias.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Integer
from numpy.typing import NDArray
from torch import Tensor

from polyhead.compat.foreign import check_functions, uncompiled
from polyhead.config import Softmax
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.device import Device
from polyhead.layers.heads.groups import SoftmaxHeads
from polyhead.spec.haiku_tree import Params, State, check, state_of, tree_of
from polyhead.spec.lazy import own_names

__dir__ = own_names(__name__)


def from_haiku(params: Params, *, heads: int, name: str | None = None, device: Device = None) -> MultiHeadAttention:
    """The module whose parameters are `params`: `MultiHeadAttention(dim, [Softmax(heads)], bias=True)`.

    `name` is the module's name in `params` ("mha", "encoder/~/mha"), needed if there are several modules.

    Raises ValueError for missing linears, an unknown name, and shapes that do not match.
    """
    state = _tensors(state_of(params, heads=heads, name=name))
    dim, dtype = state["out.weight"].shape[0], state["out.weight"].dtype
    attention = MultiHeadAttention(dim, [Softmax(heads)], bias=True, device="meta", dtype=dtype)
    attention = attention.to_empty(device="cpu" if device is None else device)
    attention.load_state_dict(state)
    return attention


def to_state_dict(params: Params, *, name: str | None = None) -> dict[str, Tensor]:
    """The state dict of `from_haiku`'s module."""
    return _tensors(state_of(params, name=name))


def _tensors(state: State) -> dict[str, Tensor]:
    return {part: torch.from_numpy(array) for part, array in state.items()}


def to_haiku(attention: MultiHeadAttention, *, name: str = "mha") -> dict[str, dict[str, NDArray[Any]]]:
    """The tutorial's parameters of `attention`, copied: the inverse of `from_haiku`.

    Raises ValueError unless it is one group of softmax heads with biases, of width / heads each.
    """
    check_functions("to_haiku", attention)
    group, dim = attention.groups[0], attention.dim
    plain = len(attention.groups) == 1 and isinstance(group, SoftmaxHeads) and attention.widths == [dim] * 3
    right = {
        f"one group of softmax heads that share the width {dim}": plain,
        "biases": attention.qkv.bias is not None,
        "no positions, q/k norms, window or causal mask": not _extras(attention),
    }
    check(right, _summary(attention))
    return tree_of({part: tensor.cpu().numpy() for part, tensor in uncompiled(attention.state_dict()).items()}, name)


def _extras(attention: MultiHeadAttention) -> bool:
    positions = attention.rotary is not None or attention.relative is not None
    return positions or attention.qk_norms is not None or attention.window is not None or attention.causal


def _summary(attention: MultiHeadAttention) -> str:
    groups = ", ".join(type(group).__name__ for group in attention.groups)
    return f"width {attention.dim}, {groups}, bias {attention.qkv.bias is not None}, causal {attention.causal}"


def from_haiku_mask(mask: Integer[np.ndarray, "..."] | Bool[np.ndarray, "..."]) -> Bool[Tensor, "b 1 t s"]:
    """The tutorial's mask (B, 1, S), (B, S, S) or (1, S, S), nonzero where a query may attend, as our Boolean mask.

    Raises ValueError for other ranks, which the tutorial's module handles wrongly or refuses.
    """
    array = np.asarray(mask)
    if array.ndim != 3:
        raise ValueError(f"from_haiku_mask: mask must be (b t s) or (b 1 s) but has shape {array.shape}")
    return torch.tensor(array != 0)[:, None]


def to_haiku_mask(mask: Bool[Tensor, "b 1 t s"]) -> Integer[np.ndarray, "b t s"]:
    """The inverse of `from_haiku_mask`: 1 where a query may attend, 0 elsewhere."""
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.dtype != torch.bool:
        raise ValueError(f"to_haiku_mask: mask must be boolean (b 1 t s) but is {mask.dtype} {tuple(mask.shape)}")
    return mask[:, 0].cpu().numpy().astype(np.int32)
