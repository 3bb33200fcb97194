"""What a layer lets one look at: q, k, v and its output, with the weights around them.

Taps are copied out on request and never hook anything; the latent code is recomputed from them for the pairs one
asks for.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from polyhead.ops.code import latent_code


@dataclass(frozen=True)
class GroupTaps:
    """One group of heads in one layer.  q and k are what the scores are made of: after normalisation and rotation."""

    kind: str  # "softmax", "linear" or "hyla"
    normalise: str
    act: str
    depth: int  # of the value network
    q: Float[Tensor, "b t h d"]
    k: Float[Tensor, "b s g d"]
    v: Float[Tensor, "b s g e"]
    output: Float[Tensor, "b t h e"]
    bias: Tensor | None  # (b|1 h|1 t s) or by offset (h t+s-1)
    mask: Bool[Tensor, "..."] | None
    causal: bool
    scale: float
    w_value: Float[Tensor, "g e _"] | None  # None where a foreign model does not let one know it
    b_value: Float[Tensor, "g e"] | None
    w_out: Float[Tensor, "h m e"] | None
    value_weight: Float[Tensor, "h e e"] | None

    def code(self) -> Float[Tensor, "b h t s"]:
        """The latent code of all pairs."""
        bias, mask, causal, scale = self.bias, self.mask, self.causal, self.scale
        return latent_code(self.q, self.k, normalise=self.normalise, bias=bias, mask=mask, causal=causal, scale=scale)


@dataclass(frozen=True)
class Taps:
    """One attention layer: its input `x` (values come from `context`, another tensor in cross-attention), its output,
    its groups.  In a layer of a foreign model, what it does not let one know is None."""

    x: Float[Tensor, "b t _"] | None
    context: Float[Tensor, "b s _"] | None
    output: Float[Tensor, "b t m"] | None
    b_out: Float[Tensor, " m"] | None
    groups: tuple[GroupTaps, ...]
    name: str = ""  # of the layer, in a foreign model

    def _only(self, name: str) -> GroupTaps:
        if len(self.groups) != 1:
            raise ValueError(f"Taps: this layer has {len(self.groups)} groups of heads: ask for groups[i].{name}")
        return self.groups[0]

    @property
    def q(self) -> Tensor:
        return self._only("q").q

    @property
    def k(self) -> Tensor:
        return self._only("k").k

    @property
    def v(self) -> Tensor:
        return self._only("v").v

    @property
    def bias(self) -> Tensor | None:
        return self._only("bias").bias

    @property
    def mask(self) -> Tensor | None:
        return self.groups[0].mask
