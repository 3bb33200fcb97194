"""The mechanisms (groups of heads of one kind) and the sources of symbols, as frozen dataclasses."""

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from polyhead.config.checked import Checked, Count, Positive, choice, non_semantic, omitted_at_default
from polyhead.config.sizes import Sizes
from polyhead.spec import ACTS, NETWORKS, NORMALISE, POOLS, RELATION_ACTS, RELATION_INIT

__all__ = [
    "Abstractor",
    "Disentangled",
    "Hyla",
    "Linear",
    "Mechanism",
    "Pooled",
    "PositionSymbols",
    "Relational",
    "RelationalSymbols",
    "RelativeSymbols",
    "Softmax",
    "SymbolicAttention",
]

LARGEST = 4096
"""The most layers, and the most neighbours, so that a file with 10^12 layers is refused at once."""

LayerCount = Annotated[int, Meta(ge=1, le=LARGEST)]


# ------------------------------------------------------------------------------------------------------ groups of heads
Act = Annotated[str, choice(ACTS)]
RelationAct = Annotated[str, choice(RELATION_ACTS)]
Normalise = Annotated[str, choice(NORMALISE)]


@dataclass(frozen=True)
class Mechanism(Checked):
    """A group of heads of one kind.  `dim` (query/key) and `value_dim` are per head; by default model width //
    total heads.

    `kv_heads`: keys and values are shared by heads // kv_heads query heads (grouped attention).  `share`: queries and
    keys are those of the group before it in the list.
    """

    heads: Count = 8
    dim: Count | None = None
    value_dim: Count | None = None
    kv_heads: Count | None = None
    share: bool = omitted_at_default(False)
    impl: str = non_semantic("auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"{type(self).__name__}: kv_heads must divide {self.heads} heads but is {self.kv_heads}")

    @property
    def reads_all_queries(self) -> bool:
        """Whether the output for one query depends on the other queries, so that none may be hidden from another."""
        return False

    def sizes(self, width: int, total_heads: int) -> Sizes:
        """The sizes of the group in a model of this width: those that are None are width // total_heads.

        Raises ValueError where one needs that and the heads do not divide the model width.
        """
        missing = []
        for name in ("dim", "value_dim"):
            if getattr(self, name) is None:
                missing.append(f"{name}=")
        if width % total_heads and missing:
            group = "" if total_heads == self.heads else f" in all ({self.heads} of them here)"
            raise ValueError(
                f"{type(self).__name__}: {total_heads} heads{group} do not divide the model width {width}: "
                f"give {' and '.join(missing)} (per head)"
            )
        dim, value_dim = self.dim or width // total_heads, self.value_dim or width // total_heads
        return Sizes(self.heads, dim, value_dim, self.kv_heads or self.heads, takes="v" if self.share else "qkv")


@dataclass(frozen=True)
class Softmax(Mechanism):
    """Softmax attention (Vaswani et al. 2017).

    `softcap`: scores x become softcap tanh(x / softcap), as in Gemma 2.  `sinks`: each head learns the score of a
    further key without a value, as in GPT-OSS.  `gate`: a head's output is multiplied by sigmoid(W x), x the layer's
    input, as in Qwen3-Next.
    """

    softcap: Positive | None = omitted_at_default(None)
    sinks: bool = omitted_at_default(False)
    gate: bool = omitted_at_default(False)


@dataclass(frozen=True)
class Linear(Mechanism):
    """Linear attention: scores without softmax.  `act` is the activation of the values."""

    normalise: Normalise = "identity"
    act: Act = "identity"


@dataclass(frozen=True)
class Hyla(Mechanism):
    """Hypernetwork linear attention (Schug et al., eq. 6; `value_depth=2` is the deep value network of eq. 10)."""

    normalise: Normalise = "rms_heads"
    act: Act = "relu"
    value_depth: Annotated[int, Meta(ge=1, le=2)] = 1


@dataclass(frozen=True)
class Pooled(Mechanism):
    """HYLA with another pooling of the keys (proposed in words by Schug et al., section 7).

    `pool`: "max", "mean" or "sum".  `network`: "pair", each pair has a value network and their outputs are pooled, or
    "query", each query has one, whose first layer reads the keys; then hidden layers and codes are pooled.  Or
    "sequence": one code of the whole sequence chooses the operation of all queries, so such heads are not causal.
    """

    normalise: Normalise = "rms_heads"
    act: Act = "relu"
    pool: Annotated[str, choice(POOLS)] = "max"
    network: Annotated[str, choice(NETWORKS)] = "pair"

    @property
    def reads_all_queries(self) -> bool:
        """One code of the whole sequence reads every query."""
        return self.network == "sequence"


# --------------------------------------------------------------------------------------------------- sources of symbols
@dataclass(frozen=True)
class Symbols(Checked):
    """The base class of sources of symbols for relational heads: values that do not depend on a token's features.

    `dim`: width of a symbol, by default the model's.  `shared`: one source for all layers instead of one per layer.
    """

    dim: Count | None = None
    shared: bool = True

    def start_std(self, width: int, max_length: int) -> float:
        """The standard deviation of initial symbols in a model of this width, used to balance relations.

        It is 1 except for relative symbols.  Mixtures of a library have a smaller one, but their common part survives
        the mean over tokens, so their contribution to a head's output is within a factor of 2 to 4.
        """
        return 1.0


@dataclass(frozen=True)
class SymbolicAttention(Symbols):
    """Each token retrieves from a library of `count` learned symbols by softmax attention over their templates.

    `heads` defaults to 4, or to the greatest common divisor of 4 and the widths.  `trainable`: whether the library is
    learned; templates always are.  `once`: symbols are computed from the embedded input, once for all layers, instead
    of from each layer's input.
    """

    count: Count = 64
    heads: Count | None = None
    trainable: bool = True
    once: bool = False


@dataclass(frozen=True)
class RelationalSymbols(SymbolicAttention):
    """Symbolic attention whose query is a token's relations to its neighbours instead of the token.

    `neighbours`: how many tokens before it (and, unless causal, after it); `include_self` adds the token itself.
    `relations`: inner products per neighbour.  `normalise`: softmax of each over the neighbours.  `causal` None: as in
    the model.
    """

    neighbours: LayerCount = 2
    relations: Count = 4
    include_self: bool = False
    normalise: bool = True
    causal: bool | None = omitted_at_default(None)


@dataclass(frozen=True)
class PositionSymbols(Symbols):
    """A learned symbol for each position."""


@dataclass(frozen=True)
class RelativeSymbols(Symbols):
    """A learned symbol for each offset of key and query; larger offsets are clipped to `distance` (None: no
    clipping)."""

    distance: Count | None = None

    def start_std(self, width: int, max_length: int) -> float:
        """The standard deviation of a uniform table of variance 2 / (rows + width)."""
        rows = 2 * (max_length - 1 if self.distance is None else self.distance) + 1
        return (2.0 / (rows + (self.dim or width))) ** 0.5


SymbolSource = SymbolicAttention | RelationalSymbols | PositionSymbols | RelativeSymbols


def check_source(caller: str, symbols: object) -> None:
    """Raise ValueError unless this is a source of symbols."""
    if not isinstance(symbols, typing.get_args(SymbolSource)):
        raise ValueError(f"{caller}: symbols must be a source such as PositionSymbols() but is {symbols!r}")


# --------------------------------------------------------------------------------------- heads whose values are symbols
@dataclass(frozen=True)
class SymbolHeads(Mechanism):
    """The base class of heads whose values are symbols.

    `symbols`: default PositionSymbols, which also work for cross-attention and limit a sequence to `max_length` tokens.

    `hidden`: queries, keys and relations come from an MLP of the token with a hidden layer of this width (gelu).  None:
    they are linear maps of the token.
    """

    symbols: SymbolSource = PositionSymbols()
    hidden: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share and self.hidden is not None:
            name = type(self).__name__
            raise ValueError(f"{name}: share takes another group's queries and keys, so hidden must be None")

    def sizes(self, width: int, total_heads: int) -> Sizes:
        """Those of any group, but values are no rows of the projection, nor are queries and keys of hidden features."""
        return replace(super().sizes(width, total_heads), takes="" if self.share or self.hidden else "qk")


@dataclass(frozen=True)
class Relational(SymbolHeads):
    """Relational attention (Altabaa and Lafferty 2024): heads retrieve symbols, and relations to the tokens they attend
    to.

    A pair has `relations` inner products (default: one per head) of width `relation_dim` (default: heads x value_dim //
    relations), shared by the heads.  `symmetric`: queries and keys of relations use one map.  `relation_init`:
    "balanced" gives relations the variance of normal symbols; "paper" is uniform within relations ** -0.5; "package"
    divides that by the root of value_dim (as released).
    """

    relations: Count | None = None
    relation_dim: Count | None = None
    relation_act: RelationAct = "identity"
    symmetric: bool = False
    relation_init: Annotated[str, choice(RELATION_INIT)] = "balanced"


@dataclass(frozen=True)
class Disentangled(SymbolHeads):
    """Disentangled relational cross-attention: each head weights symbols by attention times its own relation."""

    relation_dim: Count | None = None
    relation_act: RelationAct = "identity"
    symmetric: bool = False


@dataclass(frozen=True)
class Abstractor(SymbolHeads):
    """Relational cross-attention of the Abstractor (Altabaa et al. 2024): attention whose values are symbols.

    `act`: softmax over keys, or a pointwise activation of the scores, without normalisation.
    """

    act: RelationAct = "softmax"


# ------------------------------------------------------------------------------------------------------- lists of heads
MECHANISMS: tuple[type[Mechanism], ...] = (Softmax, Linear, Hyla, Relational, Disentangled, Abstractor, Pooled)
"""The mechanisms of a list of heads."""


def check_shared(caller: str, heads: Sequence[Mechanism], sizes: Sequence[Sizes]) -> None:
    """Raise a ValueError unless each group that shares queries and keys comes after one that has as many."""
    for i, mechanism in enumerate(heads):
        if not mechanism.share:
            continue
        size = sizes[i]
        before = "there is none"
        if i > 0:
            group = sizes[i - 1]
            if (group.heads, group.dim, group.kv_heads) == (size.heads, size.dim, size.kv_heads):
                continue
            before = f"it has {group.heads}, {group.dim} and {group.kv_heads}"
        raise ValueError(
            f"{caller}: {type(mechanism).__name__}(share=True) needs a group before it of {size.heads} heads, "
            f"dim {size.dim} and kv_heads {size.kv_heads} but {before}"
        )
