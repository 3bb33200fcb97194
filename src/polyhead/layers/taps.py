"""Taps: a layer's q, k, v and output of one call, with the weights around them.

Taps are returned on request; there are no hooks.  The latent code is recomputed from them, for the requested pairs, by
the function that computed the output.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyhead.layers.heads.functions import Code, coder_of_call, compiled, has_user_function
from polyhead.layers.heads.symbolic import SymbolGroup
from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.latent_code import inner, relate, relations, share, visible_pairs

# The value of `kind` and `normalise` for heads that compute a user's function, and of `act` if a wrapper hides it.
OWN = "own"


@dataclass(frozen=True)
class GroupTaps:
    """One group of heads in one layer; relations are recomputed from q_rel and k_rel.

    Attributes:
        q: Queries as they enter the scores: normalised and rotated.
        k: Keys as they enter the scores: normalised and rotated.
        v: Values; for relational heads, the symbols that enter the sum, by key or by offset.  By offset, query i and
            key j have row j - i + t - 1.
    """

    kind: str  # "softmax", "linear", "hyla", "relational", "disentangled", "abstractor", "pooled" or OWN
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
    w_value: Float[Tensor, "g e _"] | None  # None for symbols, and if a foreign model does not give it
    b_value: Float[Tensor, "g e"] | None
    w_out: Float[Tensor, "h m e"] | None
    value_weight: Float[Tensor, "h e e"] | None
    coder: Code  # the code function of the output, or one that raises

    q_rel: Float[Tensor, "b t r p"] | None = None
    k_rel: Float[Tensor, "b s _ p"] | None = None
    relation_act: str | None = None  # activation of relations or, for the Abstractor, of scores
    relation_weight: Float[Tensor, "h e r"] | None = None
    assignments: Float[Tensor, "b s _ n"] | None = None  # softmax over symbols, by head
    gate: Float[Tensor, "b t h e"] | None = None  # the output has been multiplied by it

    def code(self) -> Float[Tensor, "b h t s"]:
        """The latent code of all pairs.  Raises ValueError if the output came from a function with unknown code."""
        return self.coder(self._call)

    def visible(self) -> Tensor | None:
        """Where a query may attend to a key: neither a mask nor a bias of -inf hides it."""
        return visible_pairs(self._call)

    @property
    def _call(self) -> AttentionCall:
        return AttentionCall(self.q, self.k, self.v, self.bias, Masks(self.mask, self.causal), scale=self.scale)

    @property
    def relates(self) -> bool:
        """Whether these heads have relations in addition to their code."""
        return self.q_rel is not None and self.relation_act is not None

    def relations(self) -> Float[Tensor, "b r t s"]:
        """The relations of all pairs: shared by the heads, or one per head for disentangled heads.

        Raises:
            ValueError: For heads without relations; the Abstractor's relations are its code.
        """
        if self.q_rel is None or self.k_rel is None or self.relation_act is None:
            raise ValueError(f"GroupTaps: {self.kind} heads have no relations beside their code")
        k_rel = share(self.k_rel, self.q_rel.shape[2])
        if self.kind == "relational":
            return relations(self.q_rel, k_rel, relation_act=self.relation_act, mask=self.visible())
        # Each head has its own relations, scaled by p^(-1/2); a softmax over them must not count hidden keys.
        related = relate(inner(self.q_rel, k_rel, k_rel.shape[-1] ** -0.5), self.relation_act, self.visible())
        return related.to(k_rel.dtype)


def tapped(group: Any, x: AttentionCall, output: Tensor, **fields: Any) -> GroupTaps:
    """The taps of a group after the call `x`.

    A user's code function gets the limits of the call again.  For a user's function the options are unknown.

    Args:
        **fields: The scale and the weights around the heads.
    """
    bare = compiled(group)
    names: dict[str, Any] = {"kind": OWN, "normalise": OWN}
    if not has_user_function(group):
        names = {"kind": group.kind, "normalise": group.normalise}
        if isinstance(bare, SymbolGroup):
            fields |= {"relation_act": bare.relation_act, "relation_weight": bare.relation_weight}
    return GroupTaps(
        **names,
        act=getattr(group, "act", OWN),  # a wrapper may not pass on these three attributes
        depth=getattr(group, "depth", 1),
        q=x.q,
        k=x.k,
        v=x.v,
        output=output,
        bias=x.bias,
        mask=replace(x.masks, causal=False).visible(*x.lengths, x.q.device),
        causal=x.masks.causal,
        value_weight=getattr(group, "value_weight", None),
        coder=coder_of_call(group, x),
        q_rel=x.q_rel,
        k_rel=x.k_rel,
        **fields,
    )


@dataclass(frozen=True)
class Taps:
    """One attention layer: its input `x`, the source `context` of its values, its output and its groups.

    In cross-attention `context` is another tensor than x.  Fields that a foreign model does not give are None.  The
    code of all pairs is `groups[i].code()`, (b h t s); of chosen ones `analysis.codes(taps, q_index, k_index)`.
    """

    x: Float[Tensor, "b t _"] | None
    context: Float[Tensor, "b s _"] | None
    output: Float[Tensor, "b t m"] | None
    b_out: Float[Tensor, " m"] | None
    groups: tuple[GroupTaps, ...]
    name: str = ""  # name of the layer, in a foreign model or an encoder-decoder


@contextlib.contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Context manager: no dropout and no gradients inside; afterwards every module returns to its earlier mode."""
    # A part may be in another mode than the model, so the modules in training mode are noted one by one.
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
