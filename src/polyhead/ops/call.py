"""One call of an op as one value: its tensors, its masks and its options.

A public function such as `hyla` makes one `AttentionCall`.  Every implementation takes it as its only argument, and so
does the function `code` of a mechanism.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from polyhead.spec.shapes import check_heads, check_number

Bias = Float[Tensor, "#b #h t s"] | Float[Tensor, "h t+s-1"]
"""Dense, or by offset: column j - i + t - 1 holds the bias of query i and key j."""

Symbols = Float[Tensor, "b s g e"] | Float[Tensor, "t+s-1 g e"]
"""By key, or by offset: row j - i + t - 1 holds the symbol that query i reads at key j."""

Mask = Bool[Tensor, "#b #h #t #s"] | Bool[Tensor, "#h #t #s"] | Bool[Tensor, "#t #s"] | Bool[Tensor, "#s"]
"""True where a query may attend to a key."""

Packed = Int32[Tensor, "_"]
"""Cumulative lengths of sequences packed into one sample: sequence n has the rows cu_seqlens[n] to cu_seqlens[n + 1].

The entries begin with 0 and do not decrease; only eager code on the CPU checks it.  Rows behind the last entry form one
more sequence."""

Keep = Float[Tensor, "#b #h t s"]
"""Dropout mask of the code: each entry is 0 or 1 / (1 - rate)."""


@dataclass(frozen=True)
class Masks:
    """What hides keys from queries: a mask, causality, a window and packed sequences, all at once.

    The last query is aligned with the last key.  A `window` allows keys less than `window` positions away.
    """

    mask: Tensor | None = None
    causal: bool = False
    window: int | None = None
    cu_seqlens: Tensor | None = None

    @property
    def is_of_keys(self) -> bool:
        """Whether the mask, if any, is the same for every head and query: (b|1, 1, 1, s) or fewer dimensions."""
        return self.mask is None or all(size == 1 for size in self.mask.shape[-3:-1])

    @property
    def is_at_most_causal(self) -> bool:
        """Whether nothing but causality hides a key."""
        return self.mask is None and self.window is None and self.cu_seqlens is None

    def is_causal_for(self, t: int) -> bool:
        """Whether causality may hide a key from t queries: a single one is the last one, so it sees all keys."""
        if self.causal and t == 1:
            return False
        return self.causal  # not "t != 1", which is no bool under torch.compile

    def has_ranges(self, t: int) -> bool:
        """Whether causality, a window or packed sequences limit each of t queries to a range of keys."""
        return self.is_causal_for(t) or self.window is not None or self.cu_seqlens is not None

    def of_heads(self, first: int, last: int) -> "Masks":
        """The masks of the heads `first` to `last`, given those of all heads."""
        if self.mask is None or self.mask.ndim < 3 or self.mask.shape[-3] == 1:
            return self
        return replace(self, mask=self.mask[..., first:last, :, :])

    def by_name(self) -> dict[str, Any]:
        """The masks as keyword arguments of the ops."""
        return {"mask": self.mask, "causal": self.causal, "window": self.window, "cu_seqlens": self.cu_seqlens}

    def ranges(self, t: int, s: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each query the first visible key and one past the last, ignoring the mask: two non-decreasing (t) of
        int32.  For a query without a visible key the range is empty."""
        position = torch.arange(s - t, s, device=device, dtype=torch.int32)  # of the queries (t)
        first, end = torch.zeros_like(position), torch.full_like(position, s)
        if self.causal:
            end = position + 1
        if self.window is not None:
            window = min(self.window, t + s)  # keep sums within int32
            first, end = position - (window - 1), torch.minimum(end, position + window)
        if self.cu_seqlens is not None:
            first_of_sequence, end_of_sequence = sequence_ranges(self.cu_seqlens, t)
            first, end = torch.maximum(first, first_of_sequence), torch.minimum(end, end_of_sequence)
        return first.clamp_(min=0), end.clamp_(min=0, max=s)

    def visible(self, t: int, s: int, device: torch.device) -> Tensor | None:
        """Where a query may attend to a key: 2 to 4 dimensions that broadcast to (b h t s); None means everywhere."""
        limits = []
        if self.causal:
            limits.append(diagonal(t, s, device))
        if self.window is not None:
            query_positions = torch.arange(s - t, s, device=device)[:, None]  # (t 1)
            limits.append((query_positions - torch.arange(s, device=device)).abs() < self.window)
        if self.cu_seqlens is not None:
            sequence = sequence_of(self.cu_seqlens, t)
            limits.append(sequence[:, None] == sequence)  # (t t)
        if self.mask is not None:
            limits.append(self.mask)
        visible: Tensor | None = None
        for limit in limits:
            visible = both(visible, limit)
        return visible


NOTHING_HIDDEN = Masks()


def both(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The pairs that both masks allow; None allows all."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other


def diagonal(t: int, s: int, device: torch.device) -> Tensor:
    """(t s), True where key j <= i + s - t: the last query is aligned with the last key."""
    return torch.arange(s, device=device) <= torch.arange(s - t, s, device=device)[:, None]


def sequence_of(cu_seqlens: Tensor, rows: int) -> Tensor:
    """(rows,) index of the sequence of each row of a packed sample; rows behind the last edge form one more."""
    return torch.bucketize(torch.arange(rows, device=cu_seqlens.device), cu_seqlens[1:], right=True)


def sequence_ranges(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """For each row of a packed sample the first row of its sequence, and one past the last: two (rows,)."""
    edges = torch.cat((cu_seqlens.new_zeros(1), cu_seqlens[1:], cu_seqlens.new_full((1,), rows)))  # (sequences + 2)
    sequence = sequence_of(cu_seqlens, rows)
    return edges[sequence], edges[sequence + 1]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call.

    Attributes:
        v: Values; in relational mechanisms the symbols.
        scale: None means d ** -0.5 in every mechanism: taps give this number.  A mechanism with another constant
            multiplies its queries by that constant.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    masks: Masks = NOTHING_HIDDEN
    keep: Tensor | None = None
    scale: float | None = None
    impl: str = "auto"  # the implementation that the caller asked for
    normalise: str = "softmax"
    value_weight: Tensor | None = None
    q_rel: Tensor | None = None
    k_rel: Tensor | None = None
    relation_weight: Tensor | None = None
    act: str = "identity"  # of values or, in relational mechanisms, of relations
    pool: str = ""  # in pooled heads: of keys
    softcap: float | None = None  # in softmax heads: scores x become softcap tanh(x / softcap) before the bias
    sinks: Tensor | None = None  # in softmax heads: the score (h) of a further key that every query sees, of value 0
    network: str = ""  # in pooled heads: what has a value network of its own (spec.NETWORKS)

    @property
    def lengths(self) -> tuple[int, int]:
        """(t, s): the numbers of queries and keys."""
        return self.q.shape[1], self.k.shape[1]

    @property
    def score_scale(self) -> float:
        """The factor of q . k, as a number."""
        if self.scale is None:
            return self.q.shape[-1] ** -0.5
        return self.scale

    @property
    def symbols(self) -> Tensor:
        """The values of relational mechanisms."""
        return self.v

    @property
    def relation_qk(self) -> tuple[Tensor, Tensor]:
        """q_rel and k_rel, for mechanisms that have relations."""
        assert self.q_rel is not None
        assert self.k_rel is not None
        return self.q_rel, self.k_rel

    @property
    def relation_map(self) -> Tensor:
        """relation_weight, for mechanisms that have one."""
        assert self.relation_weight is not None
        return self.relation_weight

    def visible(self) -> Tensor | None:
        """Where a query may attend to a key, as `Masks.visible`."""
        return self.masks.visible(*self.lengths, self.q.device)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "AttentionCall":
        """The call with some tensors replaced, by name."""
        return replace(self, **tensors)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor | None]:
        """All tensors by name."""
        return {
            "q": self.q, "k": self.k, "v": self.v, "q_rel": self.q_rel, "k_rel": self.k_rel,
            "relation_weight": self.relation_weight, "value_weight": self.value_weight,
            "bias": self.bias, "sinks": self.sinks,
            "mask": self.masks.mask, "keep": self.keep, "cu_seqlens": self.masks.cu_seqlens,
        }  # fmt: skip

    def learned_tensors(self) -> dict[str, Tensor]:
        """The tensors that may require a gradient, by name, without those that are absent."""
        limits = ("mask", "keep", "cu_seqlens")
        return {name: x for name, x in self.tensors().items() if x is not None and name not in limits}


# --------------------------------------------------------------------------------------------------------------- checks
def check_scale(function: str, scale: object, softcap: object = None) -> None:
    """Raise ValueError for a Tensor, as native code and kernels take numbers, and for a scale that is not finite."""
    if isinstance(scale, Tensor):
        raise ValueError(f"{function}: scale must be a number but is a Tensor; multiply q by it")
    if isinstance(softcap, Tensor):
        raise ValueError(f"{function}: softcap must be a number but is a Tensor, which would get no gradient")
    if scale is not None:
        check_number(function, "scale", scale)  # type: ignore[arg-type]


def check_same_kind(function: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all tensors have one dtype and one device, and heads of some width."""
    for attribute in ("dtype", "device"):
        kinds = [getattr(x, attribute) for x in tensors.values()]
        if any(kind != kinds[0] for kind in kinds):
            *names, last = tensors
            values = ", ".join(map(str, kinds))
            raise ValueError(f"{function}: {', '.join(names)} and {last} must have one {attribute} but have {values}")
    check_heads(function, {name: x.shape for name, x in tensors.items()})
