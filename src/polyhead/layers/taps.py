"""What a layer lets one look at: q, k, v and its output, with the weights around them.

Taps are copied out on request and never hook anything; the latent code is recomputed from them for the pairs one
asks for, by the function that the output was made with.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyhead.layers.heads.functions import Code, compiled, is_own, seen_coder
from polyhead.layers.heads.groups import RelationalHeads, SymbolGroup
from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import relate, relations, share, visible

OWN = "own"
"""The kind of heads that compute a function of the user's own, and how their code is normalised."""


@dataclass(frozen=True)
class GroupTaps:
    """One group of heads in one layer.  q and k are what the scores are made of: after normalisation and rotation.

    Of relational heads v are symbols as they enter the sum, by key or by offset (row j - i + t - 1 is the symbol of
    key j for query i); relations are recomputed from q_rel and k_rel.
    """

    kind: str  # "softmax", "linear", "hyla", "relational", "disentangled", "abstractor" or OWN
    normalise: str
    act: str
    depth: int  # of the value network
    q: Float[Tensor, "b t h d"]
    k: Float[Tensor, "b s g d"]
    v: Float[Tensor, "b s g e"] | Float[Tensor, "_ g e"]
    output: Float[Tensor, "b t h e"]
    bias: Tensor | None  # (b|1 h|1 t s) or by offset (h t+s-1)
    mask: Bool[Tensor, "..."] | None
    causal: bool
    scale: float
    w_value: Float[Tensor, "g e _"] | None  # None of symbols, and where a foreign model does not let one know it
    b_value: Float[Tensor, "g e"] | None
    w_out: Float[Tensor, "h m e"] | None
    value_weight: Float[Tensor, "h e e"] | None
    coder: Code  # whose code made the output, or one that refuses

    q_rel: Float[Tensor, "b t r p"] | None = None
    k_rel: Float[Tensor, "b s _ p"] | None = None
    relation_act: str | None = None  # of relations; of an Abstractor's scores
    relation_weight: Float[Tensor, "h e r"] | None = None
    assignments: Float[Tensor, "b s _ n"] | None = None  # of a token to symbols, by head of symbolic attention

    def code(self) -> Float[Tensor, "b h t s"]:
        """The latent code of all pairs.  ValueError where that of the function which made the output is not known."""
        return self.coder(
            AttentionCall(self.q, self.k, self.v, self.bias, self.mask, causal=self.causal, scale=self.scale)
        )

    @property
    def relates(self) -> bool:
        """Whether these heads have relations beside their code."""
        return self.q_rel is not None and self.relation_act is not None

    def relations(self) -> Float[Tensor, "b r t s"]:
        """The relations of all pairs: those that the heads share or, of disentangled heads, one for each.

        ValueError for heads that have none; the Abstractor's relations are its code.
        """
        if self.q_rel is None or self.k_rel is None or self.relation_act is None:
            raise ValueError(f"GroupTaps: {self.kind} heads have no relations beside their code")
        k_rel = share(self.k_rel, self.q_rel.shape[2])
        if self.kind == "relational":
            return relations(self.q_rel, k_rel, relation_act=self.relation_act, mask=self.mask, causal=self.causal)
        look = visible(self.mask, self.causal, self.q_rel.shape[1], k_rel.shape[1], k_rel.device)
        return relate(relations(self.q_rel, k_rel, relation_act="identity"), self.relation_act, look)


def described(group: Any, x: AttentionCall) -> dict[str, Any]:
    """What taps say of a group as it is now, beside what it was given in the call: fields of `GroupTaps`.

    A code function of the user's own is given the limits of the call again.  Where a group computes a function of the
    user's own, nothing is said of how.
    """
    own = is_own(group)
    bare = compiled(group)
    how: dict[str, Any] = {"kind": OWN, "normalise": OWN} if own else {"kind": group.kind, "normalise": group.normalise}
    return how | {
        "act": getattr(group, "act", OWN),  # what wraps a group may pass none of these on
        "depth": getattr(group, "depth", 1),
        "value_weight": getattr(group, "value_weight", None),
        "relation_act": bare.relation_act if isinstance(bare, SymbolGroup) and not own else None,
        "relation_weight": bare.relation_weight if isinstance(bare, RelationalHeads) and not own else None,
        "coder": seen_coder(group, x),
    }


@dataclass(frozen=True)
class Taps:
    """One attention layer: its input `x` (values come from `context`, another tensor in cross-attention), its output,
    its groups.  In a layer of a foreign model, what it does not let one know is None."""

    x: Float[Tensor, "b t _"] | None
    context: Float[Tensor, "b s _"] | None
    output: Float[Tensor, "b t m"] | None
    b_out: Float[Tensor, " m"] | None
    groups: tuple[GroupTaps, ...]
    name: str = ""  # of the layer, in a foreign model and in an encoder-decoder

    def _only(self, name: str) -> GroupTaps:
        if len(self.groups) != 1:
            raise ValueError(f"Taps: this layer has {len(self.groups)} groups of heads: ask for groups[i].{name}")
        return self.groups[0]

    @property
    def q(self) -> Tensor:
        """Queries (b t h d) of the only group of heads; ValueError where there are several."""
        return self._only("q").q

    @property
    def k(self) -> Tensor:
        """Keys (b s g d) of the only group."""
        return self._only("k").k

    @property
    def v(self) -> Tensor:
        """Values (b s g e) of the only group."""
        return self._only("v").v

    @property
    def bias(self) -> Tensor | None:
        """Bias of the only group."""
        return self._only("bias").bias

    @property
    def mask(self) -> Tensor | None:
        """Where looking was allowed: the same for all groups."""
        return self.groups[0].mask


@contextlib.contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Without dropout or gradients; afterwards every module is in the mode it was found in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
