"""Head groups: the op of a mechanism with its sizes and its own parameters.

A group reads queries (b t h d), keys (b s g d) and values (b s g e) from the layer's joint projection and returns
(b t h e).  Its parameters are only those that a mechanism adds, such as HYLA's second value matrix.  Groups whose
values are symbols are in symbolic.py.
"""

import dataclasses
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyhead import config, ops, spec
from polyhead.config.mechanisms import MECHANISMS
from polyhead.config.sizes import Sizes, sizes
from polyhead.layers.device import Device
from polyhead.layers.heads.functions import HeadGroup, compiled, is_own
from polyhead.layers.heads.own import HasCode, OwnHeads
from polyhead.layers.heads.symbolic import AbstractorHeads, DisentangledHeads, RelationalHeads, SymbolGroup
from polyhead.layers.projection import hooked
from polyhead.spec.shapes import one_of

__all__ = ["HylaHeads", "LinearHeads", "SoftmaxHeads"]


class TokenHeads(HeadGroup):
    """Heads of a mechanism without parameters whose values come from tokens.

    `options`: options of its op, such as {"act": "relu"}.
    """

    def __init__(
        self,
        row: spec.MechanismRow,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        share: bool = False,
        options: Mapping[str, str] | None = None,
        impl: str = "auto",
    ) -> None:
        who = type(self).__name__
        super().__init__(sizes(who, heads, dim, value_dim, kv_heads, takes="v" if share else "qkv"))
        self.kind, self.takes = row.folder, tuple(row.options)
        chosen = row.options | dict(options or {})
        for name, known in row.choices.items():
            one_of(who, name, chosen[name], known)
        self.normalise, self.act = chosen.get("normalise", row.normalise), chosen.get("act", "identity")
        self.pool, self.network = chosen.get("pool", ""), chosen.get("network", "")
        self.begin(row.folder, impl)


class SoftmaxHeads(TokenHeads):
    """Softmax attention (ops.softmax_attention)."""

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        share: bool = False,
        impl: str = "auto",
        device: Device = None,  # as every module takes them; these heads hold no tensor
        dtype: torch.dtype | None = None,
    ) -> None:
        row = spec.mechanism("softmax_attention")
        super().__init__(row, heads, dim, value_dim, kv_heads=kv_heads, share=share, impl=impl)


class LinearHeads(TokenHeads):
    """Linear attention (ops.linear_attention)."""

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
        device: Device = None,  # as every module takes them; these heads hold no tensor
        dtype: torch.dtype | None = None,
    ) -> None:
        row, options = spec.mechanism("linear_attention"), {"normalise": normalise, "act": act}
        super().__init__(row, heads, dim, value_dim, kv_heads=kv_heads, share=share, options=options, impl=impl)

    @property
    def sums(self) -> bool:
        """Whether a sum over earlier tokens replaces their keys and values.  Not for a user's function, nor with
        hooks, which `step` would not call."""
        return self.normalise == "identity" and not is_own(self) and not hooked(self)

    def step(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b t g d"],
        v: Float[Tensor, "b t g e"],
        state: Float[Tensor, "b g d e"] | None,
        *,
        mask: Bool[Tensor, "b 1 1 t"] | None = None,
    ) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e"]]:
        """Causal attention of tokens that follow those in `state`: their output and the next state.

        Raises ValueError if the code is normalised, the group computes a user's function or it has hooks.
        """
        if not self.sums:
            came = "attend is not the op's" if is_own(self) else "it has hooks"
            came = came if self.normalise == "identity" else f"normalise is {self.normalise!r}"
            raise ValueError(f"LinearHeads: step needs heads that keep one sum of earlier tokens, but {came}")
        return ops.linear_step(q, k, v, state, mask=mask, act=self.act)


def sums(group: nn.Module) -> bool:
    """Whether a group, perhaps wrapped by torch.compile, may keep a sum of earlier tokens."""
    inner = compiled(group)
    return isinstance(inner, LinearHeads) and inner.sums and not hooked(group)


class HylaHeads(TokenHeads):
    """Hypernetwork linear attention (ops.hyla).  `value_depth=2` adds `value_weight` [head, out, in] (eq. 10)."""

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
        row, options = spec.mechanism("hyla"), {"normalise": normalise, "act": act}
        super().__init__(row, heads, dim, value_dim, kv_heads=kv_heads, share=share, options=options, impl=impl)
        if value_depth not in (1, 2):
            raise ValueError(f"HylaHeads: value_depth must be 1 or 2 but is {value_depth}")
        self.depth, self.takes = value_depth, (*self.takes, "value_weight")
        if value_depth == 2:
            e = self.sizes.value_dim
            self.value_weight = nn.Parameter(torch.empty(heads, e, e, device=device, dtype=dtype))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """`value_weight` N(0, 1 / value_dim), if there is one."""
        if self.value_weight is not None:
            nn.init.normal_(self.value_weight, std=self.sizes.value_dim**-0.5)


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
    """The module of a mechanism; a head without a given width gets width // total_heads.

    `bias`: whether the maps of symbols and of hidden features have a bias.  `max_length`: that of the layer, from which
    relative symbols are initialised.

    Raises ValueError for an unknown mechanism, and for heads that must divide the model width but do not.
    """
    name, size = type(mechanism).__name__, mechanism.sizes(width, total_heads)
    heads, dim, value_dim, kv_heads = size.heads, size.dim, size.value_dim, size.kv_heads
    share, impl = mechanism.share, mechanism.impl
    if isinstance(mechanism, HasCode):  # first, because a user's mechanism may inherit from one of ours
        own = dataclasses.replace(size, takes="v" if share else "qkv")
        return OwnHeads(mechanism, own, device=device, dtype=dtype)
    if isinstance(mechanism, config.SymbolHeads):
        std = mechanism.symbols.start_std(width, max_length)
        return _symbol_group(mechanism, width, size, bias=bias, symbol_std=std, device=device, dtype=dtype)
    if isinstance(mechanism, config.Softmax):
        return SoftmaxHeads(heads, dim, value_dim, kv_heads=kv_heads, share=share, impl=impl)
    if isinstance(mechanism, config.Linear):
        normalise, act = mechanism.normalise, mechanism.act
        return LinearHeads(
            heads, dim, value_dim, kv_heads=kv_heads, share=share, normalise=normalise, act=act, impl=impl
        )
    if isinstance(mechanism, config.Hyla):
        normalise, act, depth = mechanism.normalise, mechanism.act, mechanism.value_depth
        return HylaHeads(
            heads, dim, value_dim, kv_heads=kv_heads, share=share, normalise=normalise, act=act, value_depth=depth,
            impl=impl, device=device, dtype=dtype,
        )  # fmt: skip
    if type(mechanism) not in MECHANISMS:
        names = ", ".join(known.__name__ for known in MECHANISMS)
        raise ValueError(f"heads: {name} is not a mechanism (choose from {names}) and has no method `code`")
    row = next(row for row in spec.MECHANISMS if row.config == name)
    options = {option: getattr(mechanism, option) for option in row.options}
    return TokenHeads(row, heads, dim, value_dim, options=options, kv_heads=kv_heads, share=share, impl=impl)


def _symbol_group(
    m: config.SymbolHeads,
    width: int,
    size: Sizes,
    *,
    bias: bool,
    symbol_std: float,
    device: Device,
    dtype: torch.dtype | None,
) -> SymbolGroup:
    if isinstance(m, config.Abstractor):
        return AbstractorHeads(
            width, size, act=m.act, symbol_dim=m.symbols.dim, hidden=m.hidden, bias=bias, impl=m.impl, device=device,
            dtype=dtype,
        )  # fmt: skip
    if isinstance(m, config.Disentangled):
        return DisentangledHeads(
            width, size, relation_dim=m.relation_dim, relation_act=m.relation_act, symmetric=m.symmetric,
            symbol_dim=m.symbols.dim, hidden=m.hidden, bias=bias, impl=m.impl, device=device, dtype=dtype,
        )  # fmt: skip
    assert isinstance(m, config.Relational)
    return RelationalHeads(
        width, size, relations=m.relations, relation_dim=m.relation_dim, relation_act=m.relation_act,
        symmetric=m.symmetric, relation_init=m.relation_init, symbol_dim=m.symbols.dim, symbol_std=symbol_std,
        hidden=m.hidden, bias=bias, impl=m.impl, device=device, dtype=dtype,
    )  # fmt: skip
