"""Head groups: the op of a mechanism with its sizes and its own parameters.

A group reads queries (b t h d), keys (b s g d) and values (b s g e) from the layer's joint projection and returns
(b t h e).  Its parameters are only those that a mechanism adds, such as HYLA's second value matrix.  Groups whose
values are symbols are in symbolic.py.
"""

import dataclasses
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyhead import config, ops, spec
from polyhead.config.mechanisms import MECHANISMS
from polyhead.config.sizes import Sizes, sizes
from polyhead.layers.device import Device, Placement
from polyhead.layers.heads.functions import HeadGroup, compiled, is_own
from polyhead.layers.heads.own import HasCode, OwnHeads
from polyhead.layers.heads.symbolic import AbstractorHeads, DisentangledHeads, RelationalHeads, SymbolGroup
from polyhead.layers.projection import hooked
from polyhead.ops.call import AttentionCall
from polyhead.spec.shapes import one_of

__all__ = ["HylaHeads", "LinearHeads", "SoftmaxHeads"]


class TokenHeads(HeadGroup):
    """Heads of a mechanism whose values come from tokens.

    `op`: the name of its function in `ops`.  `options`: further arguments of that function, such as act="relu"; the
    others have the defaults of the mechanism's row in `spec.MECHANISMS`.
    """

    op = ""

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        op: str = "",
        kv_heads: int | None = None,
        share: bool = False,
        impl: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: str,
    ) -> None:
        kind = type(self).__name__
        super().__init__(sizes(kind, heads, dim, value_dim, kv_heads, takes="v" if share else "qkv"))
        row = spec.mechanism(op or self.op)
        unknown = options.keys() - row.options.keys()
        if unknown:
            raise TypeError(f"{kind}: unknown option {min(unknown)!r} (choose from {', '.join(row.options)})")
        for name, value in {**row.options, **options}.items():
            setattr(self, name, one_of(kind, name, value, row.choices[name]))
        self.kind, self.takes = row.folder, tuple(row.options)
        self.normalise = getattr(self, "normalise", row.normalise)
        self.act = getattr(self, "act", "identity")
        self.begin(row.folder, impl)


class SoftmaxHeads(TokenHeads):
    """Softmax attention (ops.softmax_attention).

    `softcap`: scores x become softcap tanh(x / softcap).  `sinks`: each head learns the score of a further key, which
    has no value.
    """

    op = "softmax_attention"

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        softcap: float | None = None,
        sinks: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(heads, dim, value_dim, **options)
        self.softcap = softcap
        self.sinks: nn.Parameter | None = None
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Scores of sinks 0, if there are sinks."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @property
    def extras(self) -> dict[str, Any]:
        """The soft cap and the sinks, as far as it has them."""
        extras = {"softcap": self.softcap, "sinks": self.sinks}
        return {name: value for name, value in extras.items() if value is not None}

    def options(self, call: AttentionCall) -> dict[str, Any]:
        """A soft cap and sinks of the call, which belong to a model of transformers, or its own."""
        options = self.extras
        for name in ("softcap", "sinks"):
            of_model = getattr(call, name)
            if of_model is not None and name in options:
                raise ValueError(f"Softmax: the model has {name} of its own, so its heads must have none")
            if of_model is not None:
                options[name] = of_model
        return options


class LinearHeads(TokenHeads):
    """Linear attention (ops.linear_attention); options: `normalise` and `act`."""

    op = "linear_attention"

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
            reason = "it has hooks"
            if self.normalise != "identity":
                reason = f"normalise is {self.normalise!r}"
            elif is_own(self):
                reason = "attend is not the op's"
            raise ValueError(f"LinearHeads: step needs heads that keep one sum of earlier tokens, but {reason}")
        return ops.linear_step(q, k, v, state, mask=mask, act=self.act)


def sums(group: nn.Module) -> bool:
    """Whether a group, perhaps wrapped by torch.compile, may keep a sum of earlier tokens."""
    inner = compiled(group)
    return isinstance(inner, LinearHeads) and inner.sums and not hooked(group)


class HylaHeads(TokenHeads):
    """Hypernetwork linear attention (ops.hyla); options: `normalise` and `act`.

    `value_depth=2` adds `value_weight` [head, out, in] (eq. 10).
    """

    op = "hyla"

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        value_depth: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(heads, dim, value_dim, **options)
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
    **placement: Unpack[Placement],
) -> HeadGroup:
    """The module of a mechanism; a head without a given width gets width // total_heads.

    `bias`: whether the maps of symbols and of hidden features have a bias.  `max_length`: that of the layer, from which
    relative symbols are initialised.

    Raises ValueError for an unknown mechanism, and for heads that must divide the model width but do not.
    """
    name, size = type(mechanism).__name__, mechanism.sizes(width, total_heads)
    if isinstance(mechanism, HasCode):  # first, because a user's mechanism may inherit from one of ours
        own_sizes = dataclasses.replace(size, takes="v" if mechanism.share else "qkv")
        return OwnHeads(mechanism, own_sizes, **placement)
    options: dict[str, Any] = {"impl": mechanism.impl, **placement}
    if isinstance(mechanism, config.SymbolHeads):
        options |= {"symbol_dim": mechanism.symbols.dim, "hidden": mechanism.hidden, "bias": bias}
        return _build_symbol_heads(mechanism, width, size, max_length, options)
    if not isinstance(mechanism, MECHANISMS):
        names = ", ".join(known.__name__ for known in MECHANISMS)
        raise ValueError(f"heads: {name} is not a mechanism (choose from {names}) and has no method `code`")
    row = next(row for row in spec.MECHANISMS if isinstance(mechanism, getattr(config, row.config)))
    options |= {option: getattr(mechanism, option) for option in row.options}
    options |= {"kv_heads": size.kv_heads, "share": mechanism.share}
    widths = (size.heads, size.dim, size.value_dim)
    if isinstance(mechanism, config.Softmax):
        return SoftmaxHeads(*widths, softcap=mechanism.softcap, sinks=mechanism.sinks, **options)
    if isinstance(mechanism, config.Linear):
        return LinearHeads(*widths, **options)
    if isinstance(mechanism, config.Hyla):
        return HylaHeads(*widths, value_depth=mechanism.value_depth, **options)
    return TokenHeads(*widths, op=row.op, **options)


def _build_symbol_heads(
    mechanism: config.SymbolHeads, width: int, size: Sizes, max_length: int, options: dict[str, Any]
) -> SymbolGroup:
    if isinstance(mechanism, config.Abstractor):
        return AbstractorHeads(width, size, act=mechanism.act, **options)
    assert isinstance(mechanism, config.Disentangled | config.Relational)
    for name in ("relation_dim", "relation_act", "symmetric"):
        options[name] = getattr(mechanism, name)
    if isinstance(mechanism, config.Disentangled):
        return DisentangledHeads(width, size, **options)
    options |= {"relations": mechanism.relations, "relation_init": mechanism.relation_init}
    symbol_std = mechanism.symbols.start_std(width, max_length)
    return RelationalHeads(width, size, symbol_std=symbol_std, **options)
