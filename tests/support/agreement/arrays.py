"""The arrays of a case of cases.py, and their memory layout."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agreement.cases import BY_KEY, TENSORS, Case, Layout, shapes_of


def base_of(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor in which one of `shape` lies so."""
    size, (kind, *at) = list(shape), layout
    if kind == "swap":
        size[at[0]], size[at[1]] = size[at[1]], size[at[0]]
    elif kind != "plain":
        size[at[0]] = {"slice": size[at[0]] + 3, "stride": 2 * size[at[0]], "expand": 1}[kind]
    return tuple(size)


def view(base: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
    kind, *at = layout
    if kind == "swap":
        return base.transpose(at[0], at[1])
    if kind == "slice":
        return base.narrow(at[0], 1, shape[at[0]])
    if kind == "stride":
        return base[(slice(None),) * at[0] + (slice(1, None, 2),)]
    return base.expand(shape)


def arrays(case: Case, seed: int) -> dict[str, Tensor]:
    """Bases, in the dtype of the case; the mask hides a third, and all of some rows."""
    numbers = torch.Generator().manual_seed(1_000_003 * seed + case.number)
    made, shapes = {}, shapes_of(case)
    for name, shape in shapes.items():
        size = base_of(case.layouts[name], shape)
        x = torch.randn(size, generator=numbers, dtype=torch.float64)
        if name == "mask":
            x = x > (-0.4 if case.number % 3 else 0.8)
        elif name == "keep":
            x = (x > -0.5) / 0.7
        else:
            x = x * (case.sharp if name in ("q", "qkv") else 0.5 if name == "value_weight" else 1.0)
        made[name] = x if name == "mask" else x.to(getattr(torch, case.dtype))
    if case.odd == "-inf":
        made["bias"][torch.rand(made["bias"].shape, generator=numbers) < 0.4] = -math.inf
        made["bias"][..., : made["bias"].shape[-1] // 2, :] = -math.inf if case.number % 2 else 0.0
    if case.odd == "nan":  # in whatever is at keys that the mask hides from all queries and heads
        hidden = ~view(made["mask"], case.layouts["mask"], shapes["mask"]).expand(case.shape).any(2).any(1)
        for i, name in enumerate(BY_KEY):
            if name in made and len(shapes[name]) == 4:
                x = view(made[name], case.layouts[name], shapes[name])
                x[hidden] = math.nan if (case.number + i) % 2 else math.inf
    return made


def arguments(case: Case, bases: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Tensors of the op by name, options, and the gradient of its output."""
    shapes = shapes_of(case)
    seen = {name: view(base, case.layouts[name], shapes[name]) for name, base in bases.items()}
    return *given(case, seen, torch.tensor), seen["dout"]


def given(case: Case, arrays: dict[str, Any], array: Callable[[Any], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by name and options, from the arrays that are drawn, of PyTorch or JAX; `array` makes one more."""
    seen, first, last = dict(arrays), 0, "symbols" if "symbols" in TENSORS[case.op] else "v"
    if case.tie == "joint":
        for name, *axes in (("q", "h", "d"), ("k", "g", "d"), (last, "g", "e")):
            heads, width = (case.sizes[x] for x in axes)
            part = seen["qkv"][..., first : first + heads * width]
            seen[name], first = part.reshape(*part.shape[:2], heads, width), first + heads * width
    elif case.tie:
        alias, name = {"q_rel is k_rel": ("k_rel", "q_rel"), "q is k": ("k", "q"), "k is v": (last, "k")}[case.tie]
        seen[alias] = seen[name]
    options = dict(case.options)
    options |= {name: seen[name] for name in ("bias", "mask", "keep", "value_weight", "scale") if name in seen}
    if case.edges is not None:
        options["cu_seqlens"] = array(np.array(case.edges, np.int32))
    return {name: seen[name] for name in TENSORS[case.op]}, options
