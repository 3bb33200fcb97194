"""The mechanisms (groups of heads of one kind) and the sources of symbols, as frozen dataclasses."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from polyhead.config.checked import Checked, Count, LayerCount, Positive, choice, non_semantic
from polyhead.config.components import Act
from polyhead.spec import NETWORKS, NORMALISE, POOLS, RELATION_ACTS, RELATION_INIT

__all__ = ["Abstractor", "Disentangled", "Hyla", "Linear", "Mechanism", "Pooled", "PositionSymbols"]
__all__ += ["Relational", "RelationalSymbols", "RelativeSymbols", "Softmax", "SymbolicAttention"]


# ------------------------------------------------------------------------------------------------------ groups of heads
RelationAct = Annotated[str, choice(RELATION_ACTS)]
Normalise = Annotated[str, choice(NORMALISE)]


@dataclass(frozen=True)
class Mechanism(Checked):
    """A group of heads of one kind; `dim` (query/key) and `value_dim` of a head are by default width // total heads.
    `kv_heads`: of grouped attention.  `share`: queries and keys are those of the group before it in the list."""

    heads: Count = 8
    dim: Count | None = None
    """Width of the queries and keys of a head."""
    value_dim: Count | None = None
    """Width of the values of a head."""
    kv_heads: Count | None = None
    """How many heads of keys and values the heads of queries share; None: one each."""
    share: bool = False
    """Take queries and keys from the group before it in the list."""
    impl: str = non_semantic("auto")
    """auto, or one of `polyhead list implementations`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"{type(self).__name__}: kv_heads must divide {self.heads} heads but is {self.kv_heads}")

    @property
    def reads_all_queries(self) -> bool:
        """Whether the output for one query depends on the others, so that none may be hidden from another."""
        return False


@dataclass(frozen=True)
class Softmax(Mechanism):
    """Softmax attention (Vaswani et al. 2017).

    `softcap`: scores x become softcap tanh(x / softcap), as in Gemma 2.  `sinks`: each head learns the score of a
    further key without a value (GPT-OSS).  `gate`: outputs times sigmoid(W x), x the layer's input (Qwen3-Next).
    """

    softcap: Positive | None = None
    sinks: bool = False
    gate: bool = False


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

    `network`: what has a value network.  "pair": their outputs are pooled.  "query": its first layer reads the keys,
    then hidden layers and codes are pooled.  "sequence": one code of the whole sequence chooses the operation of all
    queries, so such heads are not causal.
    """

    normalise: Normalise = "rms_heads"
    act: Act = "relu"
    pool: Annotated[str, choice(POOLS)] = "max"
    network: Annotated[str, choice(NETWORKS)] = "pair"

    @property
    def reads_all_queries(self) -> bool:
        return self.network == "sequence"


# --------------------------------------------------------------------------------------------------- sources of symbols
@dataclass(frozen=True)
class Symbols(Checked):
    """The base class of sources of symbols: the values of relational heads, which identify a token.
    `dim`: width of a symbol, by default the model's.  `shared`: one source for all layers instead of one per layer."""

    dim: Count | None = None
    shared: bool = True


@dataclass(frozen=True)
class SymbolicAttention(Symbols):
    """Each token retrieves from a library of `count` learned symbols by softmax attention over their templates.

    `heads` defaults to 4, or to the greatest common divisor of 4 and the widths.  `trainable`: learn the library, not
    only the templates.  `once`: symbols come from the embedded input, for all layers, not from each layer's input.
    """

    count: Count = 64
    heads: Count | None = None
    trainable: bool = True
    once: bool = False


@dataclass(frozen=True)
class RelationalSymbols(SymbolicAttention):
    """Symbolic attention that reads a token's relations to its neighbours instead of the token.

    `neighbours`: tokens before it (and, unless causal, after it).  `relations`: inner products per neighbour.
    `normalise`: softmax of each over the neighbours.  `causal` None: as in the model.
    """

    neighbours: LayerCount = 2
    relations: Count = 4
    include_self: bool = False
    normalise: bool = True
    causal: bool | None = None


@dataclass(frozen=True)
class PositionSymbols(Symbols):
    """A learned symbol for each position."""


@dataclass(frozen=True)
class RelativeSymbols(Symbols):
    """A learned symbol for each offset of key and query; larger offsets are clipped to `distance`, if given."""

    distance: Count | None = None


SymbolSource = SymbolicAttention | RelationalSymbols | PositionSymbols | RelativeSymbols


# --------------------------------------------------------------------------------------- heads whose values are symbols
@dataclass(frozen=True)
class SymbolHeads(Mechanism):
    """The base class of heads whose values are symbols.

    `symbols`: PositionSymbols also work for cross-attention, and limit a sequence to `max_length` tokens.  `hidden`:
    queries, keys and relations come from an MLP of the token with a hidden layer of this width (gelu), not linear maps.
    """

    symbols: SymbolSource = PositionSymbols()
    hidden: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share and self.hidden is not None:
            raise ValueError(f"{type(self).__name__}: share takes another group's queries and keys: give no hidden")


@dataclass(frozen=True)
class Relational(SymbolHeads):
    """Relational attention (Altabaa and Lafferty 2024): heads retrieve symbols, and relations to the tokens they read.

    A pair has `relations` inner products (default: one per head) of width `relation_dim` (default: heads x value_dim //
    relations), shared by the heads.  `symmetric`: queries and keys use one map.  `relation_init`: "balanced" has the
    variance of normal symbols; "paper" is uniform within relations ** -0.5, "package" over sqrt(value_dim).
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
    """Relational cross-attention of the Abstractor (Altabaa et al. 2024); `act` other than softmax is pointwise."""

    act: RelationAct = "softmax"


# ------------------------------------------------------------------------------------------------------- lists of heads
MECHANISMS: tuple[type[Mechanism], ...] = (Softmax, Linear, Hyla, Relational, Disentangled, Abstractor, Pooled)
"""The mechanisms of a list of heads."""

COMMON_FIELDS = ("dim", "value_dim", "symbols", "symmetric")  # of one meaning in all kinds of heads that have them
