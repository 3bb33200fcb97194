"""All ops by name, for code that gets the name of a mechanism from a configuration or a command line."""

import functools
from collections.abc import Callable

from torch import Tensor

from polyhead.ops.abstractor.op import ABSTRACTOR, abstractor_attention
from polyhead.ops.call import AttentionCall
from polyhead.ops.disentangled.op import DISENTANGLED, disentangled_attention
from polyhead.ops.dispatch import Op, compute_code
from polyhead.ops.hyla.op import HYLA, hyla
from polyhead.ops.linear.op import LINEAR, linear_attention
from polyhead.ops.pooled.op import POOLED, pooled_attention
from polyhead.ops.relational.op import RELATIONAL, relational_attention
from polyhead.ops.softmax.op import SOFTMAX, softmax_attention
from polyhead.spec.shapes import one_of

_OPS: dict[str, tuple[Op, Callable[..., Tensor]]] = {
    "softmax": (SOFTMAX, softmax_attention),
    "linear": (LINEAR, linear_attention),
    "hyla": (HYLA, hyla),
    "relational": (RELATIONAL, relational_attention),
    "disentangled": (DISENTANGLED, disentangled_attention),
    "abstractor": (ABSTRACTOR, abstractor_attention),
    "pooled": (POOLED, pooled_attention),
}

OPS = {name: op for name, (op, _) in _OPS.items()}
"""Op (the name of its folder) -> its implementations."""

FUNCTIONS = {name: function for name, (_, function) in _OPS.items()}
"""Op -> its public function."""

IMPLS = {name: op.impls for name, op in OPS.items()}
"""Op -> names of its implementations, in the order in which "auto" tries them."""

TENSORS = {name: tuple(op.row.tensors) for name, op in OPS.items()}
"""Op -> names of its tensor arguments."""


def resolve(op: str, impl: str = "auto") -> Callable[..., Tensor]:
    """The public function of the op with `impl` fixed; "auto" returns the function itself, which chooses at each call.

    Raises:
        ValueError: For an unknown op or impl; the message suggests the nearest valid name.
    """
    one_of("polyhead.ops", "op", op, OPS)
    if impl == "auto":
        return FUNCTIONS[op]
    one_of(OPS[op].name, "impl", impl, ("auto", *IMPLS[op]))
    return functools.partial(FUNCTIONS[op], impl=impl)


def code_of(op: str) -> Callable[[AttentionCall], Tensor]:
    """The function that computes the op's latent code (b h t s) from a call.  It can be pickled."""
    one_of("polyhead.ops", "op", op, OPS)
    return functools.partial(_compute_code, op)


def _compute_code(op: str, call: AttentionCall) -> Tensor:
    return compute_code(OPS[op], call)
