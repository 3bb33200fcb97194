"""Heads of a user's mechanism: its configuration defines what they compute.

    a = mechanism.code(own, q, k, bias=, mask=, causal=, window=, cu_seqlens=, scale=)      (b h t s)
    out = mechanism.attend(own, q, k, v, ..., keep=)                                        (b t h e)

`own` is the group; its attributes are the parameters that `mechanism.parameters(heads, dim, value_dim)` returns, by
name.  `attend` and `parameters` are optional: by default the output is the sum of code times values.  Keys and values
have as many heads as queries.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Unpack, runtime_checkable

from einops import einsum
from torch import Tensor

from polyhead.config import Mechanism
from polyhead.config.sizes import Sizes
from polyhead.layers.device import Placement
from polyhead.layers.heads.functions import Functions, HeadGroup
from polyhead.layers.own import OwnParameters
from polyhead.ops.latent_code import drop, share


@runtime_checkable
class HasCode(Protocol):
    """A mechanism with a method `code` (see above), which defines what its heads compute."""

    code: Callable[..., Tensor]


class OwnHeads(HeadGroup, OwnParameters):
    """A group of heads of a user's mechanism, with its parameters."""

    kind = normalise = "own"
    act = "identity"

    def __init__(self, mechanism: Mechanism, sizes: Sizes, **placement: Unpack[Placement]) -> None:
        super().__init__(sizes)
        if mechanism.impl not in ("auto", "reference"):
            raise ValueError(f"{type(mechanism).__name__}: impl must be auto or reference but is {mechanism.impl!r}")
        self.mechanism = mechanism
        self.attend = partial(attend, self)
        self.functions = Functions(self.attend, partial(code, self), is_user_defined=True)
        self._hold(mechanism, (sizes.heads, sizes.dim, sizes.value_dim), **placement)


def code(heads: OwnHeads, q: Tensor, k: Tensor, **limits: Any) -> Tensor:
    """The code of all pairs (b h t s), by the user's mechanism."""
    assert isinstance(heads.mechanism, HasCode)
    return heads.mechanism.code(heads, q, share(k, q.shape[2]), **limits)


def attend(heads: OwnHeads, q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None = None, **limits: Any) -> Tensor:
    """The output (b t h e) of the user's mechanism: by its `attend`, or the sum of code times values."""
    h = q.shape[2]
    user_function = getattr(heads.mechanism, "attend", None)
    if user_function is not None:
        return user_function(heads, q, share(k, h), share(v, h), keep=keep, **limits)
    return einsum(drop(code(heads, q, k, **limits), keep), share(v, h), "b h t s, b s h e -> b t h e")
