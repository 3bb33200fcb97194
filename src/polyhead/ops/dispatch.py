"""Which code computes an op: the table of backends, and the choice among them.

A name fixes the meaning, `impl` picks the code.  An explicit impl that cannot take the inputs is an error, never a
silent fallback; "auto" is the first of the table that takes them and is not measured to be slower there.  The choice
is a pure function of shapes, dtype, device and which arguments are None: nothing is imported and no data is read, so
it survives `torch.compile`.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.custom_op_rules import REFERENCES
from polyhead.ops.latent_code import Inputs, check_limits
from polyhead.spec.shapes import one_of

BACKENDS: dict[str, tuple[str, ...]] = {
    "softmax": ("sdpa", "reference"),
    "linear": ("triton", "chunked", "reference", "recurrent"),
    "hyla": ("state", "triton", "native", "blocked", "reference"),
    "relational": ("sdpa", "triton", "blocked", "reference"),
    "disentangled": ("reference",),
    "abstractor": ("sdpa", "reference"),
}
"""Op (the name of its folder) -> impls, in the order in which "auto" asks them."""

PUBLIC = {
    "softmax": "softmax_attention",
    "linear": "linear_attention",
    "hyla": "hyla",
    "relational": "relational_attention",
    "disentangled": "disentangled_attention",
    "abstractor": "abstractor_attention",
}
"""Op -> name of its public function, in its file."""

RELATED = ("q", "k", "q_rel", "k_rel", "symbols")
TENSORS = {
    **dict.fromkeys(("softmax", "linear", "hyla"), ("q", "k", "v")),
    "relational": (*RELATED, "relation_weight"),
    "disentangled": RELATED,
    "abstractor": ("q", "k", "symbols"),
}
"""Op -> its tensors, as they are called; all are of one dtype and on one device."""

IN_OP_FILE = ("reference", "recurrent")
"""Impls that live beside the public function; any other is `forward` in ops/{op}/{impl}.py."""

PORTABLE = ("sdpa",)
"""Impls that "auto" may choose in `torch.export`, beside the reference: made of PyTorch's own operations, so that the
graph runs without this package, and for all lengths.  A choice by size would limit the graph to some of them."""

TILES = ("blocked", "native")
"""Impls whose `forward` takes `twice`: from "auto", a second derivative is computed by the reference."""

_MODULES: dict[str, ModuleType] = {}


def load(op: str) -> None:
    """Import every candidate of an op; each op's file does this last, as `torch.compile` allows no import in a call."""
    _MODULES[op] = importlib.import_module(f"polyhead.ops.{op}.reference")
    REFERENCES[op] = _MODULES[op].reference
    for impl in BACKENDS[op]:
        if impl not in IN_OP_FILE:
            _MODULES[f"{op}_{impl}"] = importlib.import_module(f"polyhead.ops.{op}.{impl}")


def resolve(op: str, impl: str = "auto") -> Callable[..., Tensor]:
    """The public function of the op, with that impl; "auto" gives the function itself, which chooses per call.

    Raises ValueError, naming the nearest valid name, if there is no such op or impl.
    """
    one_of("polyhead.ops", "op", op, BACKENDS)
    if op not in _MODULES:
        load(op)
    public = getattr(_MODULES[op], PUBLIC[op])
    if impl == "auto":
        return public
    one_of(PUBLIC[op], "impl", impl, ("auto", *BACKENDS[op]))
    return functools.partial(public, impl=impl)


def backend(op: str, impl: str) -> Callable[..., Tensor]:
    """What computes an impl, for callers who have checked and cast the arguments and set what nobody may see to 0."""
    one_of(PUBLIC[op], "impl", impl, ("auto", *BACKENDS[op]))
    return getattr(_MODULES[op], impl) if impl in IN_OP_FILE else _MODULES[f"{op}_{impl}"].forward


def code_of(op: str) -> Callable[..., Tensor]:
    """The function of q, k, limits and options that gives the op's code (b h t s): the one its reference calls."""
    one_of("polyhead.ops", "op", op, BACKENDS)
    if op not in _MODULES:
        load(op)
    return _MODULES[op].code


def choose(op: str, impl: str, inputs: Inputs) -> Callable[..., Tensor]:
    """`backend`, with "auto" replaced by the first impl that takes the inputs and is worth it there.

    Raises ValueError unless the op's tensors have one dtype and one device, and the scale is a number.
    """
    for what in ("dtype", "device"):
        kinds = [getattr(getattr(inputs, name), what) for name in TENSORS[op]]
        if any(kind != kinds[0] for kind in kinds):
            *names, last = TENSORS[op]
            came = ", ".join(map(str, kinds))
            raise ValueError(f"{PUBLIC[op]}: {', '.join(names)} and {last} must have one {what} but have {came}")
    b, t, s = *inputs.q.shape[:2], inputs.k.shape[1]
    check_limits(PUBLIC[op], b, t, s, inputs.window, inputs.cu_seqlens)
    if isinstance(inputs.scale, Tensor):
        raise ValueError(f"{PUBLIC[op]}: scale must be a number but is a Tensor; multiply q by it")
    if impl != "auto":
        return backend(op, impl)
    for name in BACKENDS[op]:
        if name not in IN_OP_FILE and _takes(name, _MODULES[f"{op}_{name}"], inputs):
            forward = _MODULES[f"{op}_{name}"].forward
            return functools.partial(forward, twice=True) if name in TILES else forward
    return _MODULES[op].reference


def _takes(name: str, module: Any, inputs: Inputs) -> bool:
    wanted = name in PORTABLE if torch.compiler.is_exporting() else module.worth(inputs)
    return wanted and module.refusal(inputs) is None  # in this order: what nobody wants is not compiled either
