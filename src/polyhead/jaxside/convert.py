"""Conversion of parameters between PyTorch's state dicts and checkpoints, Haiku's trees and Flax NNX modules.

    to_flax(state or file, model) -> model        blocks.0.attention.qkv.weight -> model.blocks[0].attention.qkv.weight
    from_flax(model) -> state                     its inverse, bit for bit
    from_haiku(tree, heads=8) -> attention        mha/~/linear, linear_1, linear_2 -> qkv;   linear_3 -> out
    to_haiku(attention) -> tree                   its inverse

A state is a dict of NumPy arrays by PyTorch's names; torch is not imported.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from polyhead import config
from polyhead.jaxside.call import Array
from polyhead.jaxside.nnx.attention import MultiHeadAttention
from polyhead.jaxside.nnx.heads import ValueHeads
from polyhead.spec.haiku_tree import Params, State, check, state_of, tree_of
from polyhead.spec.lazy import own_names
from polyhead.spec.optional import optional

__dir__ = own_names(__name__)

with optional("polyhead.jaxside.convert", "polyhead[flax]"):
    from flax import nnx

PART = "model/"
"""Prefix of the model's parameters in a checkpoint; the optimiser's state is not read."""


def named(module: Any, prefix: str = "") -> Iterator[tuple[str, nnx.Variable]]:
    """The parameters of a module by PyTorch's names; tied parameters appear under each of their names."""
    inside = enumerate(module) if isinstance(module, nnx.List) else sorted(vars(module).items())
    for name, value in inside:
        if isinstance(value, nnx.Variable):
            yield f"{prefix}{name}", value
        elif isinstance(value, (nnx.Module, nnx.List)):
            yield from named(value, f"{prefix}{name}.")


def to_flax(source: Mapping[str, Any] | str | pathlib.Path, model: Any) -> Any:
    """Copy the parameters of the same PyTorch model into `model`, which may be one of `nnx.eval_shape`, and return it.

    `source`: its state dict as arrays, `{name: x.numpy() for name, x in model.state_dict().items()}`, or a safetensors
    file: the checkpoint of a run (`runs/a/checkpoint.safetensors`) or of a state dict alone.  A tied parameter may be
    there under one of its names, as `safetensors.torch.save_model` writes it.

    Raises ValueError for a file that cannot be read or is damaged, and for missing or unknown names and wrong shapes.
    """
    if not isinstance(source, (Mapping, str, os.PathLike)):  # str() of a model is many lines
        raise ValueError(f"to_flax: a state dict or a file was wanted but a {type(source).__name__} came")
    where, state = ("the state dict", dict(source)) if isinstance(source, Mapping) else (str(source), read(source))
    wanted = dict(named(model))
    held = {name: variable for name, variable in wanted.items() if name in state}
    filled = set(map(id, held.values()))
    if missing := sorted(name for name, variable in wanted.items() if id(variable) not in filled):
        raise ValueError(f"to_flax: {where} lacks {len(missing)} parameters of the model, first {missing[0]!r}")
    if extra := sorted(state.keys() - wanted.keys()):
        raise ValueError(f"to_flax: {where} has {len(extra)} parameters the model lacks, first {extra[0]!r}")
    arrays = {name: np.asarray(state[name]) for name in held}  # an error changes no parameter
    firsts: dict[int, str] = {}
    for name, variable in held.items():
        came, want = arrays[name].shape, variable.shape
        if came != want:
            raise ValueError(f"to_flax: {where} has {name!r} of shape {came} but the model wants {want}")
        first = firsts.setdefault(id(variable), name)
        if first != name and not np.array_equal(arrays[first], arrays[name], equal_nan=True):
            raise ValueError(f"to_flax: {where} has another {name!r} than {first!r}, to which the model ties it")
    # A model of nnx.eval_shape holds no arrays that could be written into.
    nnx.update(model, jax.tree.map(_array, nnx.state(model)))
    for name, variable in held.items():
        variable[...] = jnp.array(arrays[name], variable.dtype)
    return model


def _array(x: Array | jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(x.shape, x.dtype, device=x.sharding) if isinstance(x, jax.ShapeDtypeStruct) else x


def from_flax(model: Any) -> State:
    """The parameters of `model`, copied: arrays for `load_state_dict` of the same PyTorch model, or a safetensors
    file."""
    return {name: np.array(variable[...]) for name, variable in named(model)}


def read(path: str | pathlib.Path) -> State:
    """The parameters in a safetensors file; from a checkpoint those of the model.  Raises ValueError: see `to_flax`."""
    try:
        with safe_open(path, "numpy") as file:
            text = (file.metadata() or {}).get("polyhead")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise ValueError(f"to_flax: {path} does not exist") from None
    except (SafetensorError, OSError, TypeError) as error:
        raise ValueError(f"to_flax: {path} cannot be read ({' '.join(str(error).split())})") from None
    if text is None:
        return arrays
    try:
        whole = json.loads(text)["checksum"] == checksum(arrays)
    except (ValueError, RecursionError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"to_flax: {path} is damaged (its contents do not match their checksum)")
    return {name.removeprefix(PART): array for name, array in arrays.items() if name.startswith(PART)}


def checksum(arrays: Mapping[str, NDArray[Any]]) -> int:
    """The checksum that a checkpoint holds; the same as in `train.store.files`."""
    value = 0
    for name in sorted(arrays):
        data = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data
        value = zlib.crc32(data, zlib.crc32(name.encode(), value))
    return value


def from_haiku(params: Params, *, heads: int, name: str | None = None) -> MultiHeadAttention:
    """The module whose parameters are `params`: `MultiHeadAttention(dim, [Softmax(heads)], bias=True)`.

    `name` is the module's name in `params` ("mha", "encoder/~/mha"), needed if there are several modules.

    Raises ValueError for missing linears, an unknown name, and shapes that do not match.
    """
    state = state_of(params, heads=heads, name=name)
    dim, dtype = state["out.weight"].shape[0], jax.dtypes.canonicalize_dtype(state["out.weight"].dtype)
    return to_flax(state, MultiHeadAttention(dim, [config.Softmax(heads)], bias=True, dtype=dtype))


def to_haiku(attention: MultiHeadAttention, *, name: str = "mha") -> dict[str, State]:
    """The tutorial's parameters of `attention`, copied: the inverse of `from_haiku`.

    Raises ValueError unless it is one group of softmax heads with biases, of width / heads each.
    """
    group, dim, bias = attention.groups[0], attention.dim, attention.qkv.bias is not None
    softmax = len(attention.groups) == 1 and isinstance(group, ValueHeads)
    softmax = softmax and isinstance(group.mechanism, config.Softmax)
    extras = attention.rotary is not None or attention.relative is not None or len(attention.qk_norms) > 0
    right = {
        f"one group of softmax heads that share the width {dim}": softmax and attention.widths == (dim,) * 3,
        "biases": bias,
        "no positions, q/k norms, window or causal mask": not (extras or attention.window or attention.causal),
    }
    groups = ", ".join(type(mechanism).__name__ for mechanism in attention.heads)
    check(right, f"width {dim}, {groups}, bias {bias}, causal {attention.causal}")
    return tree_of(from_flax(attention), name)
