"""Heads of a user's mechanism: its configuration defines what they compute.

    a = mechanism.code(own, q, k, bias=, mask=, causal=, window=, cu_seqlens=, scale=)      (b h t s)
    out = mechanism.attend(own, q, k, v, ..., keep=)                                        (b t h e)

`own` is the group; its attributes are the parameters that `mechanism.parameters(heads, dim, value_dim)` returns, by
name.  `attend` and `parameters` are optional: by default the output is the sum of code times values.  Keys and values
have as many heads as queries.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from polyhead.config import Mechanism
from polyhead.config.sizes import Sizes
from polyhead.layers.device import Device
from polyhead.layers.heads.functions import HeadGroup
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

    def __init__(
        self, mechanism: Mechanism, sizes: Sizes, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(sizes)
        who = type(mechanism).__name__
        if mechanism.impl not in ("auto", "reference"):
            raise ValueError(f"{who}: impl must be auto or reference but is {mechanism.impl!r}")
        self.mechanism = mechanism
        self._hold(mechanism, (sizes.heads, sizes.dim, sizes.value_dim), device, dtype)

    def code(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b s g d"],
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """The code of all pairs."""
        assert isinstance(self.mechanism, HasCode)
        return self.mechanism.code(
            self, q, share(k, q.shape[2]), bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens,
            scale=scale,
        )  # fmt: skip

    def attend(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b s g d"],
        v: Float[Tensor, "b s g e"],
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
        keep: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"]:
        """The mechanism's output for queries, keys and values."""
        own = getattr(self.mechanism, "attend", None)
        h = q.shape[2]
        if own is not None:
            return own(
                self, q, share(k, h), share(v, h), bias=bias, mask=mask, causal=causal, window=window,
                cu_seqlens=cu_seqlens, scale=scale, keep=keep,
            )  # fmt: skip
        code = self.code(q, k, bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens, scale=scale)
        return einsum(drop(code, keep), share(v, h), "b h t s, b s h e -> b t h e")
