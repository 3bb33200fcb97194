"""Which implementation computes a call: an op's backends, and the choice among them.

The op's name fixes the meaning; `impl` picks the code.  An explicit impl that cannot take the inputs is an error; there
is no silent fallback.  "auto" takes the first backend that supports the call and was measured to be no slower there.
The choice is a pure function of shapes, dtype, device and which arguments are None.  It reads no data, so
`torch.compile` can trace it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall, check_same_kind, check_scale
from polyhead.ops.latent_code import code as latent_code_of, harmless_keys
from polyhead.ops.precision import cast_call, without_autocast
from polyhead.ops.readable import is_cheap_to_read
from polyhead.spec import MechanismRow
from polyhead.spec.shapes import check_masks, check_window, one_of

EXPORTABLE = ("sdpa",)
"""Backends that "auto" may choose in `torch.export`, beside the reference.  They consist of PyTorch's own operations,
so the exported graph runs without this package.  The choice ignores sizes: otherwise the graph would be valid for some
lengths only."""

Implementation = Callable[[AttentionCall], Tensor]


@runtime_checkable
class Backend(Protocol):
    """A faster implementation of an op: a module with these three functions, or a `Kernel`."""

    @property
    def forward(self) -> Implementation:
        """The output (b t h e)."""

    @property
    def unsupported_reason(self) -> Callable[[AttentionCall], str | None]:
        """Why it cannot take a call, as a part of a sentence, or None.  It may compile native code."""

    @property
    def preferred(self) -> Callable[[AttentionCall], bool]:
        """Whether it was measured to be no slower than what "auto" would take without it."""


@dataclass
class Op:
    """A mechanism as a function of tensors: its equation, and other implementations of the same equation.

    Attributes:
        row: Its row in the table of mechanisms.
        backends: Impl -> backend, in the order in which "auto" tries them.
        code: The latent code (b h t s) that the equation uses.
    """

    row: MechanismRow
    reference: Implementation
    backends: dict[str, Backend]
    code: Implementation = latent_code_of

    def __post_init__(self) -> None:
        self.choices = self.row.choices  # option -> its allowed values
        self.tensor_names = (*self.row.tensors, *self.row.optional)

    @property
    def name(self) -> str:
        """The name of its public function, such as "softmax_attention"."""
        return self.row.op

    @property
    def impls(self) -> tuple[str, ...]:
        """Names of its implementations, in the order in which "auto" tries them."""
        return (*self.backends, "reference")


def run(op: Op, call: AttentionCall) -> Tensor:
    """The output (b t h e) of a call by the implementation `call.impl`.

    Keys and values that are masked for every query are set to 0 first.

    Raises:
        ValueError: For an unknown option, for tensors of the op that differ in dtype or device, and for an explicit
            impl that does not support the call.
    """
    call = cast_call(call)
    for option, choices in op.choices.items():
        value = call.act if option == "relation_act" else getattr(call, option)
        one_of(op.name, option, value, choices)
    if call.masks.window is not None:  # native code and kernels want Python's integer
        window = check_window(op.name, call.masks.window)
        call = replace(call, masks=replace(call.masks, window=window))
    forward = choose(op, call)
    # The call has its dtype now; autocast inside would cast once more.
    with without_autocast(call.q):
        return forward(with_harmless_keys(call))


def choose(op: Op, call: AttentionCall) -> Implementation:
    """The function that computes a call; "auto" is the first backend that supports the call and is preferred."""
    check_tensors(op, call)
    # The equation takes every call, so it needs no reason and no measurement.
    if call.impl == "reference":
        return op.reference
    if call.impl != "auto":
        one_of(op.name, "impl", call.impl, ("auto", *op.impls))
        backend = op.backends[call.impl]
        reason = backend.unsupported_reason(call)
        if reason is not None:
            raise ValueError(f"{op.name}: impl {call.impl!r} {reason}; use impl='auto' or 'reference'")
        return backend.forward

    for impl, backend in op.backends.items():
        if torch.compiler.is_exporting():
            is_eligible = impl in EXPORTABLE
        else:
            is_eligible = backend.preferred(call)
        # `unsupported_reason` comes second, because it may compile native code.
        if is_eligible and backend.unsupported_reason(call) is None:
            return backend.forward
    return op.reference


def check_tensors(op: Op, call: AttentionCall) -> None:
    """Raise ValueError unless the op's tensors share one dtype and one device, and the masks fit them."""
    tensors = {}
    for name in op.tensor_names:
        tensor = call.symbols if name == "symbols" else getattr(call, name)
        if tensor is not None:
            tensors[name] = tensor
    check_same_kind(op.name, tensors)
    for name, tensor in call.tensors().items():
        # Beside a meta tensor the kernels would take the call for one without numbers.
        if tensor is not None and tensor.is_meta and not call.q.is_meta:
            raise ValueError(f"{op.name}: {name} must be on {call.q.device}, as q is, but is on meta")
    check_masks(op.name, call.masks, call.q.shape[0], *call.lengths, is_cheap_to_read)
    check_scale(op.name, call.scale)


def with_harmless_keys(call: AttentionCall) -> AttentionCall:
    """The call with zeros for keys and values that its mask hides from every query: there NaN would spread."""
    mask = call.masks.mask
    if mask is None:
        return call
    call = replace(call, k=harmless_keys(mask, call.k), v=harmless_keys(mask, call.v))
    if call.k_rel is None:
        return call
    return replace(call, k_rel=harmless_keys(mask, call.k_rel))


def compute_code(op: Op, call: AttentionCall) -> Tensor:
    """The latent code (b h t s) of a call; the reference computes the same one."""
    call = cast_call(call)
    with without_autocast(call.q):
        return op.code(replace(call, k=harmless_keys(call.masks.mask, call.k)))
