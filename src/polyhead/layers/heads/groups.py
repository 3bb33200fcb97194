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
from polyhead.layers.device import Placement
from polyhead.layers.heads.functions import HeadGroup, compiled, has_user_function
from polyhead.layers.heads.own import HasCode, OwnHeads
from polyhead.layers.heads.sizes import Sizes, sizes_of
from polyhead.layers.heads.symbolic import AbstractorHeads, DisentangledHeads, RelationalHeads
from polyhead.layers.projection import hooked
from polyhead.ops.call import AttentionCall

__all__ = ["HylaHeads", "LinearHeads", "SoftmaxHeads"]


class TokenHeads(HeadGroup):
    """Heads of a mechanism whose values come from tokens; options, as in `spec.MECHANISMS`, are attributes."""

    def __init__(self, mechanism: config.Mechanism, sizes: Sizes, **_: Unpack[Placement]) -> None:
        super().__init__(sizes)
        row = next(row for row in spec.MECHANISMS if isinstance(mechanism, getattr(config, row.config)))
        for name in row.options:
            setattr(self, name, getattr(mechanism, name))
        self.kind, self.option_names = row.folder, tuple(row.options)
        self.normalise = getattr(self, "normalise", row.normalise)
        self.act = getattr(self, "act", "identity")
        self.begin(row.folder, mechanism.impl)


class SoftmaxHeads(TokenHeads):
    """Softmax attention (ops.softmax_attention), with the soft cap and the learned scores of sinks (h,), if any."""

    def __init__(self, mechanism: config.Softmax, sizes: Sizes, **placement: Unpack[Placement]) -> None:
        super().__init__(mechanism, sizes)
        self.softcap = mechanism.softcap
        self.sinks: nn.Parameter | None = None
        if mechanism.sinks:
            self.sinks = nn.Parameter(torch.zeros(sizes.heads, **placement))

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

    @property
    def sums(self) -> bool:
        """Whether a sum over earlier tokens replaces their keys and values.  Not for a user's function, nor with
        hooks, which `step` would not call."""
        return self.normalise == "identity" and not has_user_function(self) and not hooked(self)

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

        Raises:
            ValueError: If the code is normalised, or the group computes a user's function or has hooks.
        """
        if not self.sums:
            reason = "attend is not the op's, or it has hooks"
            if self.normalise != "identity":
                reason = f"normalise is {self.normalise!r}"
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

    def __init__(self, mechanism: config.Hyla, sizes: Sizes, **placement: Unpack[Placement]) -> None:
        super().__init__(mechanism, sizes)
        self.depth, self.option_names = mechanism.value_depth, (*self.option_names, "value_weight")
        if self.depth == 2:
            e = sizes.value_dim
            self.value_weight = nn.Parameter(torch.empty(sizes.heads, e, e, **placement))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """`value_weight` N(0, 1 / value_dim), if there is one."""
        if self.value_weight is not None:
            nn.init.normal_(self.value_weight, std=self.sizes.value_dim**-0.5)


TOKEN_GROUPS: dict[type, Any] = {config.Softmax: SoftmaxHeads, config.Linear: LinearHeads, config.Hyla: HylaHeads}
SYMBOL_GROUPS: dict[type, Any] = {
    config.Relational: RelationalHeads,
    config.Disentangled: DisentangledHeads,
    config.Abstractor: AbstractorHeads,
}


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

    Args:
        bias: Whether the maps of symbols, and of hidden features to queries and keys, have a bias.
        max_length: The layer's, from which relative symbols are initialised.

    Raises:
        ValueError: For an unknown mechanism, and for heads that must divide the model width but do not.
    """
    size = sizes_of(mechanism, width, total_heads)
    if isinstance(mechanism, HasCode):  # first, because a user's mechanism may inherit from one of ours
        own_sizes = dataclasses.replace(size, takes="v" if mechanism.share else "qkv")
        return OwnHeads(mechanism, own_sizes, **placement)
    for kind, group in TOKEN_GROUPS.items():
        if isinstance(mechanism, kind):
            return group(mechanism, size, **placement)
    for kind, group in SYMBOL_GROUPS.items():
        if isinstance(mechanism, kind):
            return group(mechanism, width, size, bias=bias, max_length=max_length, **placement)
    if isinstance(mechanism, MECHANISMS):  # its op needs no parameters and no more than its row's options
        return TokenHeads(mechanism, size, **placement)
    name, names = type(mechanism).__name__, ", ".join(known.__name__ for known in MECHANISMS)
    raise ValueError(f"heads: {name} is not a mechanism (choose from {names}) and has no method `code`")
