"""Head groups: the op of a mechanism with its sizes and its own parameters.

A group reads queries (b t h d), keys (b s g d) and values (b s g e) from the layer's joint projection and returns
(b t h e). Only what a mechanism adds to that (the second value matrix of HYLA) is a parameter here.  Groups whose
values are symbols are in symbolic.py.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyhead import config
from polyhead.config.mechanisms import MECHANISMS
from polyhead.layers import Device
from polyhead.layers.heads import functions
from polyhead.layers.heads.own import Coded, OwnHeads
from polyhead.layers.heads.sizes import Sizes, sizes
from polyhead.layers.heads.symbolic import AbstractorHeads, DisentangledHeads, RelationalHeads
from polyhead.layers.symbols import symbol_std
from polyhead.ops.linear.reference import linear_step
from polyhead.spec import ACTS, NORMALISE
from polyhead.spec.shapes import one_of


class SoftmaxHeads(nn.Module):
    """Softmax attention (ops.softmax_attention)."""

    kind, normalise, act, depth = "softmax", "softmax", "identity", 1
    value_weight: Tensor | None = None
    attend: Callable[..., Tensor]
    use, code, extra_repr = functions.use, functions.code, functions.extra_repr

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        share: bool = False,
        impl: str = "auto",
        device: torch.device | str | None = None,  # as every module takes them; these heads hold no tensor
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes("SoftmaxHeads", heads, dim, value_dim, kv_heads, takes="v" if share else "qkv")
        functions.begin(self, "softmax", impl)

    def forward(
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
        keep: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"]:
        return self.attend(
            q, k, v, bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens, scale=None, keep=keep,
        )  # fmt: skip


class LinearHeads(nn.Module):
    """Linear attention (ops.linear_attention)."""

    kind, depth = "linear", 1
    value_weight: Tensor | None = None
    attend: Callable[..., Tensor]
    use, code, extra_repr = functions.use, functions.code, functions.extra_repr

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        share: bool = False,
        normalise: str = "identity",
        act: str = "identity",
        impl: str = "auto",
        device: torch.device | str | None = None,  # as every module takes them; these heads hold no tensor
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes("LinearHeads", heads, dim, value_dim, kv_heads, takes="v" if share else "qkv")
        self.normalise = one_of("LinearHeads", "normalise", normalise, NORMALISE)
        self.act = one_of("LinearHeads", "act", act, ACTS)
        functions.begin(self, "linear", impl)

    def forward(
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
        keep: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"]:
        return self.attend(
            q, k, v, bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens, scale=None, keep=keep,
            normalise=self.normalise, act=self.act,
        )  # fmt: skip

    @property
    def sums(self) -> bool:
        """Whether all that queries read of earlier tokens is one sum over them: not of a function of the user's."""
        return self.normalise == "identity" and not functions.is_own(self)

    def step(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b t g d"],
        v: Float[Tensor, "b t g e"],
        state: Float[Tensor, "b g d e"] | None,
        *,
        mask: Bool[Tensor, "b 1 1 t"] | None = None,
    ) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e"]]:
        """Causal attention of tokens that follow those in `state`, and the state that has these, too.

        ValueError where the code is normalised, or the group computes a function of the user's own: neither is a sum.
        """
        if not self.sums:
            came = "attend is not the op's" if self.normalise == "identity" else f"normalise is {self.normalise!r}"
            raise ValueError(f"LinearHeads: step needs heads that keep one sum of earlier tokens, but {came}")
        return linear_step(q, k, v, state, mask=mask, act=self.act)


class HylaHeads(nn.Module):
    """Hypernetwork linear attention (ops.hyla).  `value_depth=2` adds `value_weight` [head, out, in] (eq. 10)."""

    kind = "hyla"
    attend: Callable[..., Tensor]
    use, code, extra_repr = functions.use, functions.code, functions.extra_repr

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        share: bool = False,
        normalise: str = "rms_heads",
        act: str = "relu",
        value_depth: int = 1,
        impl: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = sizes("HylaHeads", heads, dim, value_dim, kv_heads, takes="v" if share else "qkv")
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
        functions.begin(self, "hyla", impl)

    def forward(
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
        keep: Tensor | None = None,
    ) -> Float[Tensor, "b t h e"]:
        return self.attend(
            q, k, v, bias=bias, mask=mask, causal=causal, window=window, cu_seqlens=cu_seqlens, scale=None, keep=keep,
            normalise=self.normalise, act=self.act, value_weight=self.value_weight,
        )  # fmt: skip


SymbolGroup = RelationalHeads | DisentangledHeads | AbstractorHeads
HeadGroup = SoftmaxHeads | LinearHeads | HylaHeads | SymbolGroup | OwnHeads


def build(
    mechanism: config.Mechanism,
    width: int,
    total_heads: int,
    *,
    bias: bool = False,
    max_length: int = 512,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> HeadGroup:
    """The module of a mechanism; a head that names no width gets width // total_heads.

    `bias`: on the maps of symbols and of hidden features, which the joint projection does not make.  `max_length`: of
    the layer, by which relative symbols begin.

    Raises ValueError where one needs that and the heads do not divide the model width.
    """
    name = type(mechanism).__name__
    if width % total_heads and None in (mechanism.dim, mechanism.value_dim):
        raise ValueError(
            f"{name}: {total_heads} heads do not divide the model width {width}: give dim= and value_dim= (per head)"
        )
    dim, value_dim = mechanism.dim or width // total_heads, mechanism.value_dim or width // total_heads
    heads, impl = mechanism.heads, mechanism.impl
    if isinstance(mechanism, Coded):  # a user's own, which may inherit from one of ours
        size = sizes(name, heads, dim, value_dim, mechanism.kv_heads, takes="v" if mechanism.share else "qkv")
        return OwnHeads(mechanism, size, device=device, dtype=dtype)
    how: dict[str, Any] = {"impl": impl, "device": device, "dtype": dtype}
    if isinstance(mechanism, config.SymbolHeads):
        size = sizes(name, heads, dim, value_dim, mechanism.kv_heads)
        return _symbol_group(mechanism, width, size, bias, max_length, how)
    how |= {"kv_heads": mechanism.kv_heads, "share": mechanism.share}
    if isinstance(mechanism, config.Softmax):
        return SoftmaxHeads(heads, dim, value_dim, **how)
    if isinstance(mechanism, config.Linear):
        return LinearHeads(heads, dim, value_dim, normalise=mechanism.normalise, act=mechanism.act, **how)
    if isinstance(mechanism, config.Hyla):
        how |= {"normalise": mechanism.normalise, "act": mechanism.act, "value_depth": mechanism.value_depth}
        return HylaHeads(heads, dim, value_dim, **how)
    names = ", ".join(known.__name__ for known in MECHANISMS)
    raise ValueError(f"heads: {name} is not a mechanism (choose from {names}) and has no method `code`")


def _symbol_group(
    mechanism: config.SymbolHeads, width: int, size: Sizes, bias: bool, max_length: int, how: dict[str, Any]
) -> SymbolGroup:
    size = dataclasses.replace(size, takes="" if mechanism.share or mechanism.hidden else "qk")
    how = {"hidden": mechanism.hidden, "symbol_dim": mechanism.symbols.dim, "bias": bias, **how}
    if isinstance(mechanism, config.Abstractor):
        return AbstractorHeads(width, size, act=mechanism.act, **how)
    assert isinstance(mechanism, (config.Relational, config.Disentangled))
    how |= {"relation_dim": mechanism.relation_dim, "relation_act": mechanism.relation_act}
    if isinstance(mechanism, config.Disentangled):
        return DisentangledHeads(width, size, symmetric=mechanism.symmetric, **how)
    how |= {"relations": mechanism.relations, "relation_init": mechanism.relation_init}
    how |= {"symbol_std": symbol_std(mechanism.symbols, width, max_length)}
    return RelationalHeads(width, size, symmetric=mechanism.symmetric, **how)


def shared_groups(heads: Sequence[config.Mechanism], groups: Sequence[HeadGroup]) -> list[bool]:
    """Which groups read the queries and keys of the group before them.  ValueError unless that one has as many."""
    for i, mechanism in enumerate(heads):
        wanted = [(g.sizes.heads, g.sizes.dim, g.sizes.kv_heads) for g in groups[max(0, i - 1) : i + 1]]
        if mechanism.share and (i == 0 or wanted[0] != wanted[1]):
            h, d, g = wanted[-1]
            came = "there is none" if i == 0 else "it has {}, {} and {}".format(*wanted[0])
            raise ValueError(
                f"MultiHeadAttention: {type(mechanism).__name__}(share=True) needs a group before it of {h} heads, "
                f"dim {d} and kv_heads {g} but {came}"
            )
    return [mechanism.share for mechanism in heads]
