"""State dicts of foreign models, tensor by tensor: which part of our parameters each of their tensors is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.heads.functions import compiled, has_user_function


@dataclass(frozen=True)
class TensorMapping:
    """One foreign tensor: all its keys there, all names of our tensor, and the `index` of its part of ours."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    index: tuple[slice, ...] = (slice(None),)


def of_linear(*keys: str, name: str, bias: bool = True, rows: slice = slice(None)) -> Iterator[TensorMapping]:
    """The weight of a linear layer or norm with these keys, and its bias, as `rows` of ours."""
    for part in ("weight", "bias") if bias else ("weight",):
        yield TensorMapping(tuple(f"{key}.{part}" for key in keys), (f"{name}.{part}",), (rows,))


@torch.no_grad()
def fill(caller: str, module: nn.Module, mappings: Sequence[TensorMapping], state: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `state` to our parameters and set all other entries to 0.

    Raises:
        ValueError: For missing or unknown keys, wrong shapes, and keys of one tensor that differ.
    """
    known_keys: set[str] = set()
    missing = []
    for mapping in mappings:
        known_keys.update(mapping.keys)
        if state.keys().isdisjoint(mapping.keys):
            missing.append(mapping.keys[0])
    problems = []
    for problem, keys in (("missing", sorted(missing)), ("unknown", sorted(state.keys() - known_keys))):
        if keys:
            problems.append(f"{problem} {', '.join(keys[:3])}")
    if problems:
        raise ValueError(f"{caller}: {'; '.join(problems)}")

    targets = module.state_dict()
    for target in targets.values():
        target.zero_()
    for mapping in mappings:
        # A file may hold a shared tensor under only one of its keys.
        keys = [key for key in mapping.keys if key in state]
        value = state[keys[0]]
        if not value.is_floating_point():  # codes of a quantised weight are not the weight
            raise ValueError(f"{caller}: {keys[0]} must be floating but is {value.dtype}")
        for key in keys[1:]:
            if state[key].data_ptr() != value.data_ptr() and not torch.equal(state[key], value):
                raise ValueError(f"{caller}: {keys[0]} and {key} are one tensor in the package but differ")
        for name in mapping.names:
            part = targets[name][mapping.index]
            if part.shape != value.shape:
                raise ValueError(f"{caller}: {keys[0]} must be {tuple(part.shape)} but is {tuple(value.shape)}")
            part.copy_(value)


def uncompiled(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without the prefix `_orig_mod.` that torch.compile adds to keys, of a model or of its parts."""
    return {str(key).replace("_orig_mod.", ""): value for key, value in state.items()}


def tensor_of(name: str, value: Any) -> Tensor:
    """A tensor that copies a parameter of PyTorch, NumPy or JAX, also in bfloat16.  Raises ValueError for others."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    array = np.array(value)
    if array.dtype.name == "bfloat16":  # a dtype of ml_dtypes, which torch does not read
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} must be an array of numbers, got {type(value).__name__} of {array.dtype}")
    return torch.from_numpy(array)


def check_functions(function: str, model: nn.Module) -> None:
    """Raise ValueError for a user's function, soft caps, sinks and gates: foreign formats have no place for them."""
    for layer in model.modules():
        if not isinstance(layer, MultiHeadAttention):
            continue
        extras = layer.gates is not None
        for group in layer.groups:
            if has_user_function(group):
                name = type(compiled(group)).__name__
                raise ValueError(f"{function}: {name} must compute the op of their kind but compute a user's function")
            extras |= bool(compiled(group).extras)
        if extras:
            raise ValueError(f"{function}: softmax heads must have no softcap, sinks or gate, got {layer.groups}")
