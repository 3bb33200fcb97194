"""One call of an op as one value: its tensors, its masks and its options.

A public function makes one `AttentionCall`.  The reference, every other impl and the function `code` of a mechanism
take it as their only argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Bool, Float, Int32
from torch import Tensor

Bias = Float[Tensor, "#b #h t s"] | Float[Tensor, "h t+s-1"]
"""Dense, or by offset: column j - i + t - 1 holds the bias of query i and key j."""

Symbols = Float[Tensor, "b s g e"] | Float[Tensor, "t+s-1 g e"]
"""By key, or by offset: row j - i + t - 1 holds the symbol that query i reads at key j."""

Mask = Bool[Tensor, "#b #h #t #s"] | Bool[Tensor, "#h #t #s"] | Bool[Tensor, "#t #s"] | Bool[Tensor, "#s"]
"""True where a query may attend to a key."""

Packed = Int32[Tensor, "_"]
"""Sequences packed into one sample: sequence n has the rows from cu_seqlens[n] up to, not including, cu_seqlens[n +
1].  The entries begin with 0 and do not decrease.  Only eager code on the CPU checks it.  Rows behind the last edge
form one more sequence."""

Keep = Float[Tensor, "#b #h t s"]
"""Dropout mask of the code: each entry is 0 or 1 / (1 - rate)."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call.  In relational mechanisms `v` holds the symbols.

    `scale` None means d ** -0.5 in every mechanism: taps give this number.  A mechanism with another constant
    multiplies its queries by it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    keep: Tensor | None = None
    causal: bool = False
    window: int | None = None
    cu_seqlens: Tensor | None = None
    normalise: str = "softmax"
    value_weight: Tensor | None = None
    q_rel: Tensor | None = None
    k_rel: Tensor | None = None
    relation_weight: Tensor | None = None
    act: str = "identity"  # of values or, in relational mechanisms, of relations
    scale: float | Tensor | None = None  # a Tensor is refused
    pool: str = ""  # in pooled heads: of keys
    network: str = ""  # in pooled heads: whose value network it is

    @property
    def lengths(self) -> tuple[int, int]:
        """(t, s)."""
        return self.q.shape[1], self.k.shape[1]

    @property
    def factor(self) -> float:
        """The scale of the products of queries and keys, as a number."""
        assert not isinstance(self.scale, Tensor)
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def limited(self) -> bool:
        """Whether the call has a mask, a window or packed sequences; causality does not count."""
        return self.mask is not None or self.window is not None or self.cu_seqlens is not None

    @property
    def symbols(self) -> Tensor:
        """The values of relational mechanisms."""
        return self.v

    @property
    def related(self) -> tuple[Tensor, Tensor]:
        """q_rel and k_rel; the mechanism must have them."""
        assert self.q_rel is not None
        assert self.k_rel is not None
        return self.q_rel, self.k_rel

    @property
    def relation_map(self) -> Tensor:
        """relation_weight; the mechanism must have one."""
        assert self.relation_weight is not None
        return self.relation_weight

    def masked(self, mask: Tensor | None) -> "AttentionCall":
        """The call with `mask` in place of its mask, causality, window and packed sequences."""
        return replace(self, mask=mask, causal=False, window=None, cu_seqlens=None)

    def of(self, tensors: Mapping[str, Tensor]) -> "AttentionCall":
        """The call with some tensors replaced, by name."""
        return replace(self, **tensors)  # type: ignore[arg-type]
