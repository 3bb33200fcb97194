"""Which code computes an op: the table of backends, and the choice among them.

The op's name fixes the meaning; `impl` picks the code.  An explicit impl that cannot take the inputs is an error; there
is no silent fallback.  "auto" takes the first impl of the table that supports the call and was measured to be no slower
there.  The choice is a pure function of shapes, dtype, device and which arguments are None.  It imports nothing and
reads no data, so `torch.compile` can trace it.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import PUBLIC, REFERENCES
from polyhead.ops.latent_code import blank, check_alike, check_limits, check_scale
from polyhead.ops.precision import casting
from polyhead.ops.tiles import refuse
from polyhead.ops.tiling import Blocked
from polyhead.spec import MECHANISMS
from polyhead.spec.shapes import check_window, one_of

BACKENDS: dict[str, tuple[str, ...]] = {
    "softmax": ("native", "sdpa", "blocked", "reference"),
    "linear": ("triton", "native", "chunked", "blocked", "reference", "recurrent"),
    "hyla": ("state", "triton", "native", "blocked", "reference"),
    "relational": ("native", "sdpa", "triton", "blocked", "reference"),
    "disentangled": ("blocked", "reference"),
    "abstractor": ("sdpa", "blocked", "reference"),
}
"""Op (the name of its folder) -> impls, in the order in which "auto" tries them.  An op that is missing here has two
impls: its reference, and "blocked", which is derived from the reference."""

BACKENDS |= {row.folder: ("blocked", "reference") for row in MECHANISMS if row.folder not in BACKENDS}

TENSORS = {row.folder: tuple(row.tensors) for row in MECHANISMS}
"""Op -> names of its tensor arguments; they and those of OPTIONAL must have one dtype and one device."""

OPTIONAL = {row.folder: tuple(row.optional) for row in MECHANISMS}
"""Op -> names of the tensor arguments that may be absent."""

CHOICES = {row.folder: row.choices for row in MECHANISMS}
"""Op -> name of an option -> its allowed values."""

IN_OP_FILE = ("reference", "recurrent")
"""Impls that live beside the public function; any other is `forward` in ops/{op}/{impl}.py.  An op without a file
blocked.py gets its "blocked" from the reference (tiling.py)."""

PORTABLE = ("sdpa",)
"""Impls that "auto" may choose in `torch.export`, beside the reference.  They consist of PyTorch's own operations, so
the exported graph runs without this package.  The choice ignores sizes: otherwise the graph would be valid for some
lengths only."""

TILES = ("blocked", "native", "triton")
"""Impls whose `forward` takes `twice`.  "auto" sets it: then the reference computes second derivatives."""

Impl = Callable[[AttentionCall], Tensor]

_MODULES: dict[str, ModuleType] = {}
_IMPLS: dict[tuple[str, str], ModuleType | Blocked] = {}


def load(op: str) -> None:
    """Import every impl of an op.  Each reference.py calls this last, because `torch.compile` cannot trace an
    import."""
    _MODULES[op] = sys.modules[f"polyhead.ops.{op}.reference"]
    REFERENCES[op] = _MODULES[op].reference
    for impl in BACKENDS[op]:
        if impl not in IN_OP_FILE:
            _IMPLS[op, impl] = _made(op, impl)


def _home(op: str) -> ModuleType:
    """The module of the op's public function; its import loads the op."""
    return _MODULES[op] if op in _MODULES else importlib.import_module(f"polyhead.ops.{op}.reference")


def _made(op: str, impl: str) -> ModuleType | Blocked:
    name = f"polyhead.ops.{op}.{impl}"
    if impl == "blocked" and importlib.util.find_spec(name) is None:
        return Blocked(op)
    return importlib.import_module(name)


def implementation(op: str, impl: str) -> ModuleType | Blocked:
    """The object with `forward`, `unsupported_reason` and `preferred` of an impl outside the op's own file."""
    _home(op)
    return _IMPLS[op, impl]


def resolve(op: str, impl: str = "auto") -> Callable[..., Tensor]:
    """The public function of the op with `impl` fixed; "auto" returns the function itself, which chooses at each call.

    Raises ValueError for an unknown op or impl; the message suggests the nearest valid name.
    """
    one_of("polyhead.ops", "op", op, BACKENDS)
    public = getattr(_home(op), PUBLIC[op])
    if impl == "auto":
        return public
    one_of(PUBLIC[op], "impl", impl, ("auto", *BACKENDS[op]))
    return functools.partial(public, impl=impl)


def code_of(op: str) -> Impl:
    """The function that computes the op's code (b h t s) from a call; the reference calls the same one."""
    one_of("polyhead.ops", "op", op, BACKENDS)
    _home(op)
    return functools.partial(_coded, op)


def _coded(op: str, x: AttentionCall) -> Tensor:
    with casting(x.q, x.k) as (q, k):
        return _MODULES[op].code(replace(x, q=q, k=blank(x.mask, k)[0]))


def compute(op: str, impl: str, x: AttentionCall) -> Tensor:
    """The output of a call by `impl`.  Keys and values that are masked for every query are set to 0 first.

    Raises ValueError for an unknown option, and unless the op's tensors share one dtype and one device and the scale
    is a number.
    """
    for name, valid in CHOICES[op].items():
        one_of(PUBLIC[op], name, x.act if name == "relation_act" else getattr(x, name), valid)
    if x.window is not None:  # native code and kernels want Python's integer
        x = replace(x, window=check_window(PUBLIC[op], x.window))
    forward = choose(op, impl, x)
    if x.mask is None:
        return forward(x)
    k, v = blank(x.mask, x.k, x.v)
    return forward(replace(x, k=k, v=v, k_rel=None if x.k_rel is None else blank(x.mask, x.k_rel)[0]))


def choose(op: str, impl: str, x: AttentionCall) -> Impl:
    """The function that computes the call by `impl`; "auto" is the first one that supports the call and is preferred.

    Keys that are masked for every query must be 0.  Raises ValueError if an explicit impl does not support the call.
    """
    tensors = {name: getattr(x, name) for name in (*TENSORS[op], *OPTIONAL[op])}
    check_alike(PUBLIC[op], {name: a for name, a in tensors.items() if a is not None})
    check_limits(PUBLIC[op], x.q.shape[0], *x.lengths, x.window, x.cu_seqlens)
    check_scale(PUBLIC[op], x.scale)
    if impl != "auto":
        one_of(PUBLIC[op], "impl", impl, ("auto", *BACKENDS[op]))
        if impl in IN_OP_FILE:
            return getattr(_MODULES[op], impl)
        refuse(PUBLIC[op], impl, _IMPLS[op, impl].unsupported_reason(x))
        return _IMPLS[op, impl].forward
    for name in BACKENDS[op]:
        if name not in IN_OP_FILE and _taken(name, _IMPLS[op, name], x):
            forward = _IMPLS[op, name].forward
            return functools.partial(forward, twice=True) if name in TILES else forward
    return _MODULES[op].reference


def _taken(name: str, module: ModuleType | Blocked, x: AttentionCall) -> bool:
    wanted = name in PORTABLE if torch.compiler.is_exporting() else module.preferred(x)
    # Asked second, because unsupported_reason may compile native code.
    return wanted and module.unsupported_reason(x) is None
