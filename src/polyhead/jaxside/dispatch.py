"""Which code computes an op: its impls, in the order in which "auto" tries them, and the choice among them.

The op's name fixes the meaning; `impl` picks the code.  An explicit impl that cannot take the inputs is an error; there
is no silent fallback.  "auto" takes the first impl that supports the call and was measured to be no slower there.  The
choice is a function of shapes, dtypes, options and which arguments are None, so it is made while JAX traces.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from polyhead.jaxside.call import AttentionCall
from polyhead.jaxside.latent_code import blank, check_limits, check_scale
from polyhead.spec import mechanism
from polyhead.spec.shapes import check_heads, one_of


@dataclass(frozen=True)
class Impl:
    """The function of an impl, why it cannot take a call (or None), and whether it was measured to be no slower."""

    forward: Callable[[AttentionCall], jax.Array]
    unsupported_reason: Callable[[AttentionCall], str | None] = lambda x: None
    preferred: Callable[[AttentionCall], bool] = lambda x: True


def compute(who: str, impls: Mapping[str, Impl], impl: str, x: AttentionCall) -> jax.Array:
    """The output of a call of the op `who` by an impl; "auto" takes the first that supports the call and is preferred.

    Raises ValueError for an unknown option or impl, an impl that cannot take the call, more than one dtype, and
    invalid limits.
    """
    for name, known in mechanism(who).choices.items():
        one_of(who, name, x.act if name == "relation_act" else getattr(x, name), known)
    x = jax.tree.map(jnp.asarray, x)
    _check(who, x)
    k_rel = None if x.k_rel is None else blank(x.mask, x.k_rel)
    x = replace(x, k=blank(x.mask, x.k), v=blank(x.mask, x.v), k_rel=k_rel)
    x = x if x.scale is None else replace(x, scale=x.factor)  # an integer has no gradient
    if impl != "auto":
        chosen = impls[one_of(who, "impl", impl, ("auto", *impls))]
        if (reason := chosen.unsupported_reason(x)) is not None:
            raise ValueError(f"{who}: impl {impl!r} {reason}; use impl='auto' or 'reference'")
        return chosen.forward(x)
    return next(i.forward(x) for i in impls.values() if i.unsupported_reason(x) is None and i.preferred(x))


def _check(who: str, x: AttentionCall) -> None:
    """The checks beyond those of `@shaped`."""
    row = mechanism(who)
    names = [*row.tensors, *(name for name in row.optional if getattr(x, name) is not None)]
    arrays = [getattr(x, "v" if name == "symbols" else name) for name in names]
    kinds = [array.dtype for array in arrays]
    if any(kind != kinds[0] for kind in kinds):
        came = ", ".join(map(str, kinds))
        raise ValueError(f"{who}: {', '.join(names[:-1])} and {names[-1]} must have one dtype but have {came}")
    check_heads(who, {name: array.shape for name, array in zip(names, arrays, strict=True)})
    check_scale(who, x.scale)
    check_limits(who, x.q.shape[0], *x.lengths, x.window, x.cu_seqlens)
