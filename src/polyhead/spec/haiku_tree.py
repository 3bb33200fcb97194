"""The mapping between our parameters and the Haiku parameters of the tutorial "Yet Another (JAX) Transformer", in
NumPy.

    params["mha/~/linear"]["w"] (in, out), ["b"] (out,)      queries        -> rows of qkv: w.T
    params["mha/~/linear_1"], params["mha/~/linear_2"]       keys, values
    params["mha/~/linear_3"]                                 output         -> out: w.T

`compat.haiku` and `jaxside.convert` use it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyhead.spec.table import PROJECTIONS

LINEARS = ("linear", "linear_1", "linear_2", "linear_3")
Params = Mapping[str, Mapping[str, Any]]
State = dict[str, NDArray[Any]]


def state_of(params: Params, *, heads: int | None = None, name: str | None = None) -> State:
    """The parameters qkv.weight, qkv.bias, out.weight, out.bias of `MultiHeadAttention(dim, Softmax(heads),
    bias=True)`, copied.

    `name` is the module's name in `params` ("mha", "encoder/~/mha"), needed if there are several modules.

    Raises ValueError for missing linears, an unknown name, and shapes or heads that do not match.
    """
    prefix = _prefix(params, name)
    weights, biases = [], []
    for linear in LINEARS:
        entry = params.get(f"{prefix}{linear}")
        if entry is None or set(entry) != {"w", "b"}:
            came = "nothing" if entry is None else ", ".join(sorted(entry))
            raise ValueError(f"from_haiku: {prefix}{linear} must hold w and b but holds {came}")
        weights.append(np.array(entry["w"]).T)
        biases.append(np.array(entry["b"]))
    dim = weights[-1].shape[0]
    for linear, weight, bias in zip(LINEARS, weights, biases, strict=True):
        if weight.shape != (dim, dim) or bias.shape != (dim,):
            shapes = f"w {weight.T.shape} and b {bias.shape}"
            raise ValueError(f"from_haiku: {prefix}{linear} must be w ({dim}, {dim}) and b ({dim},) but is {shapes}")
    if heads is not None and (heads < 1 or dim % heads):
        raise ValueError(f"from_haiku: the number of heads must divide the width {dim} but is {heads}")
    joined = np.concatenate(weights[:3]), np.concatenate(biases[:3]), np.ascontiguousarray(weights[3]), biases[3]
    return dict(zip(PROJECTIONS, joined, strict=True))


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


def tree_of(state: Mapping[str, NDArray[Any]], name: str = "mha") -> dict[str, State]:
    """The inverse of `state_of`: the tutorial's parameters, copied."""
    weight, bias, out, out_bias = (state[part] for part in PROJECTIONS)
    weights, biases = (*np.split(weight, 3), out), (*np.split(bias, 3), out_bias)
    return {
        f"{name}/~/{linear}": {"w": weight.T.copy(), "b": bias.copy()}
        for linear, weight, bias in zip(LINEARS, weights, biases, strict=True)
    }


def check(right: Mapping[str, bool], came: str) -> None:
    """Raise ValueError for the first property of the tutorial's module that an attention, `came`, lacks."""
    for wanted, has in right.items():
        if not has:
            raise ValueError(f"to_haiku: the tutorial's module has {wanted} but this one has not: {came}")
