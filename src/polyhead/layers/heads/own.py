"""Heads of a user's mechanism: its configuration defines what they compute.

    a = mechanism.code(own, q, k, bias=, mask=, causal=, window=, cu_seqlens=, scale=)      (b h t s)
    out = mechanism.attend(own, q, k, v, ..., keep=)                                        (b t h e)

`own` is the group, with the parameters that `mechanism.parameters(heads, dim, value_dim)` returns as attributes.
`attend` and `parameters` are optional.  Keys and values have as many heads as queries.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, Unpack, runtime_checkable

import torch
from torch import Tensor, nn

from polyhead.config import Mechanism
from polyhead.layers.device import Placement
from polyhead.layers.heads.functions import Functions, HeadGroup
from polyhead.layers.heads.sizes import Sizes
from polyhead.ops.latent_code import drop, share


@runtime_checkable
class HasCode(Protocol):
    """A mechanism with a method `code` (see above), which defines what its heads compute."""

    code: Callable[..., Tensor]


class OwnHeads(HeadGroup):
    """A group of heads of a user's mechanism, with the parameters that its method `parameters` returns, if any."""

    kind = normalise = "own"
    act = "identity"

    def __init__(self, mechanism: Mechanism, sizes: Sizes, **placement: Unpack[Placement]) -> None:
        super().__init__(sizes)
        if mechanism.impl not in ("auto", "reference"):
            raise ValueError(f"{type(mechanism).__name__}: impl must be auto or reference but is {mechanism.impl!r}")
        self.mechanism = mechanism
        self.attend = partial(attend, self)
        self.functions = Functions(self.attend, partial(code, self), is_user_defined=True)
        device, dtype = placement.get("device"), placement.get("dtype")
        for name, value in self._initial().items():
            if hasattr(self, name) or not isinstance(value, Tensor):
                kind = type(mechanism).__name__
                raise ValueError(f"{kind}: parameter {name!r} must be a tensor under a name that is free")
            parameter = value.detach().to(device=device, dtype=dtype or value.dtype, copy=True)  # it may be a constant
            setattr(self, name, nn.Parameter(parameter))

    def _initial(self) -> Mapping[str, Tensor]:
        if not hasattr(self.mechanism, "parameters"):
            return {}
        return self.mechanism.parameters(self.sizes.heads, self.sizes.dim, self.sizes.value_dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin anew, from torch's default generator."""
        for name, value in self._initial().items():
            getattr(self, name).copy_(value)


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
    return torch.einsum("b h t s, b s h e -> b t h e", drop(code(heads, q, k, **limits), keep), share(v, h))
