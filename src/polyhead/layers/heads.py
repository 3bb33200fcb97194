"""Head groups: the op of a mechanism with its sizes and its own parameters.

A group reads queries (b t h d), keys (b s g d) and values (b s g e) from the layer's joint projection and returns
(b t h e). Only what a mechanism adds to that (the second value matrix of HYLA) is a parameter here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead import config
from polyhead.layers import Device
from polyhead.ops.dispatch import resolve
from polyhead.shapes import one_of
from polyhead.spec import ACTS, NORMALISE


@dataclass(frozen=True)
class Sizes:
    """Per head: `dim` of queries and keys, `value_dim` of values; `kv_heads` divides `heads`."""

    heads: int
    dim: int
    value_dim: int
    kv_heads: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Rows this group takes of the query, key and value projections."""
        return self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.value_dim


def _sizes(who: str, heads: int, dim: int, value_dim: int | None, kv_heads: int | None) -> Sizes:
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{who}: kv_heads must divide {heads} heads but is {kv_heads}")
    return Sizes(heads, dim, dim if value_dim is None else value_dim, kv_heads)


class SoftmaxHeads(nn.Module):
    """Softmax attention (ops.softmax_attention)."""

    kind, normalise, act, depth = "softmax", "softmax", "identity", 1
    value_weight: Tensor | None = None

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,  # as every module takes them; these heads hold no tensor
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = _sizes("SoftmaxHeads", heads, dim, value_dim, kv_heads)
        self.attend: Callable[..., Tensor] = resolve("softmax", impl)

    def forward(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b s g d"],
        v: Float[Tensor, "b s g e"],
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        keep: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"]:
        return self.attend(q, k, v, bias=bias, mask=mask, causal=causal, scale=None, keep=keep)


class LinearHeads(nn.Module):
    """Linear attention (ops.linear_attention)."""

    kind, depth = "linear", 1
    value_weight: Tensor | None = None

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        normalise: str = "identity",
        act: str = "identity",
        impl: str = "auto",
        device: torch.device | str | None = None,  # as every module takes them; these heads hold no tensor
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = _sizes("LinearHeads", heads, dim, value_dim, kv_heads)
        self.normalise = one_of("LinearHeads", "normalise", normalise, NORMALISE)
        self.act = one_of("LinearHeads", "act", act, ACTS)
        self.attend: Callable[..., Tensor] = resolve("linear", impl)

    def forward(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b s g d"],
        v: Float[Tensor, "b s g e"],
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        keep: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"]:
        choice = {"normalise": self.normalise, "act": self.act}
        return self.attend(q, k, v, bias=bias, mask=mask, causal=causal, scale=None, keep=keep, **choice)


class HylaHeads(nn.Module):
    """Hypernetwork linear attention (ops.hyla).  `value_depth=2` adds `value_weight` [head, out, in] (eq. 10)."""

    kind = "hyla"

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        normalise: str = "rms_heads",
        act: str = "relu",
        value_depth: int = 1,
        impl: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = _sizes("HylaHeads", heads, dim, value_dim, kv_heads)
        self.normalise = one_of("HylaHeads", "normalise", normalise, NORMALISE)
        self.act = one_of("HylaHeads", "act", act, ACTS)
        if value_depth not in (1, 2):
            raise ValueError(f"HylaHeads: value_depth must be 1 or 2 but is {value_depth}")
        self.depth = value_depth
        e = self.sizes.value_dim
        weight = nn.Parameter(torch.empty(heads, e, e, device=device, dtype=dtype)) if value_depth == 2 else None
        self.value_weight = weight
        if weight is not None:
            nn.init.normal_(weight, std=e**-0.5)
        self.attend: Callable[..., Tensor] = resolve("hyla", impl)

    def forward(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b s g d"],
        v: Float[Tensor, "b s g e"],
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        keep: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"]:
        choice = {"normalise": self.normalise, "act": self.act, "value_weight": self.value_weight}
        return self.attend(q, k, v, bias=bias, mask=mask, causal=causal, scale=None, keep=keep, **choice)


HeadGroup = SoftmaxHeads | LinearHeads | HylaHeads


def build(
    mechanism: config.Mechanism,
    width: int,
    total_heads: int,
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> HeadGroup:
    """The module of a mechanism; a head that names no width gets width // total_heads.

    Raises ValueError where one needs that and the heads do not divide the model width.
    """
    name = type(mechanism).__name__
    if width % total_heads and None in (mechanism.dim, mechanism.value_dim):
        raise ValueError(
            f"{name}: {total_heads} heads do not divide the model width {width}: give dim= and value_dim= (per head)"
        )
    dim, value_dim = mechanism.dim or width // total_heads, mechanism.value_dim or width // total_heads
    heads, kv_heads, impl = mechanism.heads, mechanism.kv_heads, mechanism.impl
    if isinstance(mechanism, config.Softmax):
        return SoftmaxHeads(heads, dim, value_dim, kv_heads=kv_heads, impl=impl)
    if isinstance(mechanism, config.Linear):
        return LinearHeads(
            *(heads, dim, value_dim),
            kv_heads=kv_heads,
            normalise=mechanism.normalise,
            act=mechanism.act,
            impl=impl,
        )
    if isinstance(mechanism, config.Hyla):
        return HylaHeads(
            *(heads, dim, value_dim),
            kv_heads=kv_heads,
            normalise=mechanism.normalise,
            act=mechanism.act,
            value_depth=mechanism.value_depth,
            impl=impl,
            device=device,
            dtype=dtype,
        )
    raise ValueError(f"heads: {name} is not a mechanism (choose from Softmax, Linear, Hyla)")
