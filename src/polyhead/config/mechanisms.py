"""The mechanisms (groups of heads of one kind) and the sources of symbols, as frozen dataclasses."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from polyhead.config.components import Act
from polyhead.spec import NETWORKS, NORMALISE, POOLS, RELATION_ACTS, RELATION_INIT
from polyhead.spec.checked import Checked, Count, LayerCount, Positive, choice, non_semantic

__all__ = ["Abstractor", "Disentangled", "Hyla", "Linear", "Mechanism", "Pooled", "PositionSymbols"]
__all__ += ["Relational", "RelationalSymbols", "RelativeSymbols", "Softmax", "SymbolicAttention"]


# ------------------------------------------------------------------------------------------------------ groups of heads
RelationAct = Annotated[str, choice(RELATION_ACTS)]
Normalise = Annotated[str, choice(NORMALISE)]


@dataclass(frozen=True)
class Mechanism(Checked):
    """A group of heads of one kind.

    Attributes:
        heads: How many heads of queries the group has.
        dim: Width of the queries and keys of a head; None: width of the model // all its heads.
        value_dim: Width of the values of a head; None: likewise.
        kv_heads: How many heads of keys and values the heads of queries share; None: one each.
        share: Take queries and keys from the group before it in the list.
        impl: auto, or one of `polyhead list implementations`.
    """

    heads: Count = 8
    dim: Count | None = None
    value_dim: Count | None = None
    kv_heads: Count | None = None
    share: bool = False
    impl: str = non_semantic("auto")

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

    Attributes:
        softcap: Scores x become softcap tanh(x / softcap), as in Gemma 2.
        sinks: Each head learns the score of a further key without a value (GPT-OSS).
        gate: Outputs are multiplied by sigmoid(W x), where x is the layer's input (Qwen3-Next).
    """

    softcap: Positive | None = None
    sinks: bool = False
    gate: bool = False


@dataclass(frozen=True)
class Linear(Mechanism):
    """Linear attention: scores without softmax.

    Attributes:
        normalise: How scores become the code: a name of `spec.NORMALISE`.
        act: Activation of the values: identity, relu, gelu, gelu_tanh or silu.
    """

    normalise: Normalise = "identity"
    act: Act = "identity"


@dataclass(frozen=True)
class Hyla(Mechanism):
    """Hypernetwork linear attention (Schug et al., eq. 6).

    Attributes:
        normalise: How scores become the latent code: a name of `spec.NORMALISE`.
        act: Activation of the value network: identity, relu, gelu, gelu_tanh or silu.
        value_depth: Hidden layers of the value network; 2 is the deep value network of eq. 10.
    """

    normalise: Normalise = "rms_heads"
    act: Act = "relu"
    value_depth: Annotated[int, Meta(ge=1, le=2)] = 1


@dataclass(frozen=True)
class Pooled(Mechanism):
    """HYLA with another pooling of the keys (proposed in words by Schug et al., section 7).

    Attributes:
        normalise: How scores become the latent code: a name of `spec.NORMALISE`.
        act: Activation of the value network: identity, relu, gelu, gelu_tanh or silu.
        pool: max, mean or sum.
        network: What has a value network.  "pair": their outputs are pooled.  "query": its first layer reads the keys,
            then hidden layers and codes are pooled.  "sequence": one code of the whole sequence chooses the operation
            of all queries, so such heads are not causal.
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

    Attributes:
        dim: Width of a symbol; None: that of the model.
        shared: One source for all layers, instead of one per layer.
    """

    dim: Count | None = None
    shared: bool = True


@dataclass(frozen=True)
class SymbolicAttention(Symbols):
    """Each token retrieves from a library of `count` learned symbols by softmax attention over their templates.

    Attributes:
        count: Symbols of the library.
        heads: Heads of that attention; None: 4, or the greatest common divisor of 4 and the widths.
        trainable: Learn the library, not only the templates.
        once: Symbols come from the embedded input, for all layers, not from each layer's input.
    """

    count: Count = 64
    heads: Count | None = None
    trainable: bool = True
    once: bool = False


@dataclass(frozen=True)
class RelationalSymbols(SymbolicAttention):
    """Symbolic attention that reads a token's relations to its neighbours instead of the token.

    Attributes:
        neighbours: How many tokens before it, and unless causal after it, are neighbours.
        relations: Inner products per neighbour.
        include_self: A token is its own neighbour, too.
        normalise: Softmax of each relation over the neighbours.
        causal: No neighbours after the token; None: as in the model.
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
    """A learned symbol for each offset of key and query.

    Attributes:
        distance: Larger offsets are clipped to it; None: no offset is.
    """

    distance: Count | None = None


SymbolSource = SymbolicAttention | RelationalSymbols | PositionSymbols | RelativeSymbols


# --------------------------------------------------------------------------------------- heads whose values are symbols
@dataclass(frozen=True)
class SymbolHeads(Mechanism):
    """The base class of heads whose values are symbols.

    Attributes:
        symbols: Their source.  PositionSymbols also work for cross-attention, and limit a sequence to `max_length`.
        hidden: Queries, keys and relations come from an MLP of the token with a hidden layer of this width (gelu);
            None: from linear maps.
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

    Attributes:
        relations: Inner products of a pair, shared by the heads; None: one per head.
        relation_dim: Width of an inner product; None: heads x value_dim // relations.
        relation_act: Activation of relations: a name of `spec.RELATION_ACTS`.
        symmetric: Queries and keys of relations use one map.
        relation_init: "balanced" has the variance of normal symbols; "paper" is uniform within relations ** -0.5,
            "package" over sqrt(value_dim).
    """

    relations: Count | None = None
    relation_dim: Count | None = None
    relation_act: RelationAct = "identity"
    symmetric: bool = False
    relation_init: Annotated[str, choice(RELATION_INIT)] = "balanced"


@dataclass(frozen=True)
class Disentangled(SymbolHeads):
    """Disentangled relational cross-attention: each head weights symbols by attention times its own relation.

    Attributes:
        relation_dim: Width of the inner product; None: that of the values.
        relation_act: Activation of relations: a name of `spec.RELATION_ACTS`.
        symmetric: Queries and keys of relations use one map.
    """

    relation_dim: Count | None = None
    relation_act: RelationAct = "identity"
    symmetric: bool = False


@dataclass(frozen=True)
class Abstractor(SymbolHeads):
    """Relational cross-attention of the Abstractor (Altabaa et al. 2024).

    Attributes:
        act: Softmax over the keys, or a pointwise activation: a name of `spec.RELATION_ACTS`.
    """

    act: RelationAct = "softmax"


# ------------------------------------------------------------------------------------------------------- lists of heads
MECHANISMS: tuple[type[Mechanism], ...] = (Softmax, Linear, Hyla, Relational, Disentangled, Abstractor, Pooled)
"""The mechanisms of a list of heads."""

COMMON_FIELDS = ("dim", "value_dim", "symbols", "symmetric")  # of one meaning in all kinds of heads that have them
