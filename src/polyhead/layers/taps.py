"""What a layer lets one look at: q, k, v and its output, with the weights around them.

Taps are copied out on request and never hook anything; the latent code is recomputed from them for the pairs one
asks for.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from polyhead.layers.heads import HeadGroup
from polyhead.ops.code import latent_code, relate, relations, share, visible


@dataclass(frozen=True)
class GroupTaps:
    """One group of heads in one layer.  q and k are what the scores are made of: after normalisation and rotation.

    Of relational heads v are symbols as they enter the sum, by key or by offset (row j - i + t - 1 is the symbol of
    key j for query i); relations are recomputed from q_rel and k_rel.
    """

    kind: str  # "softmax", "linear", "hyla", "relational", "disentangled" or "abstractor"
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

    q_rel: Float[Tensor, "b t r p"] | None = None
    k_rel: Float[Tensor, "b s _ p"] | None = None
    relation_act: str | None = None  # of relations; of an Abstractor's scores
    relation_weight: Float[Tensor, "h e r"] | None = None
    assignments: Float[Tensor, "b s _ n"] | None = None  # of a token to symbols, by head of symbolic attention

    def code(self) -> Float[Tensor, "b h t s"]:
        """The latent code of all pairs."""
        return code_of(self, self.q, self.k, self.bias, self.mask, self.causal, scale=self.scale)

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


def code_of(
    group: GroupTaps | HeadGroup,
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    bias: Tensor | None,
    mask: Bool[Tensor, "..."] | None,
    causal: bool,
    *,
    scale: float | None = None,
) -> Float[Tensor, "b h t s"]:
    """The latent code of all pairs, of a group of heads: by its normalisation or, of an Abstractor, its activation."""
    code = latent_code(q, k, normalise=group.normalise, bias=bias, mask=mask, causal=causal, scale=scale)
    if group.kind != "abstractor" or group.normalise == "softmax":
        return code
    look, act = visible(mask, causal, q.shape[1], k.shape[1], q.device), str(group.relation_act)
    code = relate(code, act, look)
    return code if look is None else code.masked_fill(~look, 0)


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
