"""The parts a model is made of, as frozen dataclasses: mechanisms, positions, feed-forward layers and ends.

`config.py` is the door: it gives all of them, with the transformer, the task and the run they enter.
"""

from dataclasses import dataclass, field
from typing import Any

from polyhead.shapes import one_of
from polyhead.spec import ACTS, NORMALISE


def plain(default: Any) -> Any:
    """A field that cannot change the result of a run: it stays out of the digest."""
    return field(default=default, kw_only=True, metadata={"semantic": False})


@dataclass(frozen=True)
class Mechanism:
    """A group of heads of one kind.  `dim` (query/key) and `value_dim` are per head; by default model width //
    total heads.

    `kv_heads`: keys and values are shared by heads // kv_heads query heads (grouped attention).
    """

    heads: int = 8
    dim: int | None = None
    value_dim: int | None = None
    kv_heads: int | None = None
    impl: str = plain("auto")

    def __post_init__(self) -> None:
        who = type(self).__name__
        for name in ("heads", "dim", "value_dim", "kv_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) and (value is not None or name == "heads"):
                raise ValueError(f"{who}: {name} must be an integer but is {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"{who}: {name} must be at least 1 but is {value}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"{who}: kv_heads must divide {self.heads} heads but is {self.kv_heads}")


@dataclass(frozen=True)
class Softmax(Mechanism):
    """Softmax attention (Vaswani et al. 2017)."""


@dataclass(frozen=True)
class Linear(Mechanism):
    """Linear attention: scores are used as they are.  `act` acts on the values."""

    normalise: str = "identity"
    act: str = "identity"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("Linear", "normalise", self.normalise, NORMALISE)
        one_of("Linear", "act", self.act, ACTS)


@dataclass(frozen=True)
class Hyla(Mechanism):
    """Hypernetwork linear attention (Schug et al., eq. 6; `value_depth=2` is the deep value network of eq. 10)."""

    normalise: str = "rms_heads"
    act: str = "relu"
    value_depth: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("Hyla", "normalise", self.normalise, NORMALISE)
        one_of("Hyla", "act", self.act, ACTS)
        if self.value_depth not in (1, 2):
            raise ValueError(f"Hyla: value_depth must be 1 or 2 but is {self.value_depth}")


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of q and k.  `interleaved` turns pairs (2j, 2j+1), `half` turns pairs (j, j + d/2)."""

    theta: float = 1e4
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        one_of("Rotary", "layout", self.layout, ("interleaved", "half"))


@dataclass(frozen=True)
class RelativeBias:
    """T5 relative bias, one table per layer.  Defaults: as many buckets as positions; keys after the query share
    bucket 0."""

    buckets: int | None = None
    max_distance: int | None = None
    bidirectional: bool = False


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases: score - slope_h |i - j| (Press et al. 2022)."""


@dataclass(frozen=True)
class Learned:
    """A learned vector per position, added to the inputs of the first layer."""


@dataclass(frozen=True)
class Sinusoidal:
    """Sines and cosines of the position, added to the inputs of the first layer (Vaswani et al. 2017)."""


Position = Rotary | RelativeBias | Alibi | Learned | Sinusoidal


@dataclass(frozen=True)
class Mlp:
    """Two linear maps with `act` between them.  `hidden` defaults to 4 x width."""

    hidden: int | None = None
    act: str = "gelu"
    bias: bool = True

    def __post_init__(self) -> None:
        one_of("Mlp", "act", self.act, ACTS)


@dataclass(frozen=True)
class Swiglu:
    """W2(silu(W1 x) * W3 x), no biases.  `hidden` defaults to floor(8/3 width) down to a multiple of 64."""

    hidden: int | None = None


@dataclass(frozen=True)
class Experts:
    """Mixture of expert MLPs: the top k of a linear gate, weighted by the softmax over those k; no noise."""

    experts: int = 4
    top_k: int = 2
    hidden: int | None = None
    act: str = "gelu"
    bias: bool = True
    balance: float = 0.01  # weight of the load-balance loss

    def __post_init__(self) -> None:
        one_of("Experts", "act", self.act, ACTS)
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"Experts: top_k must be 1 to {self.experts} (experts) but is {self.top_k}")


FeedForward = Mlp | Swiglu | Experts


@dataclass(frozen=True)
class Tokens:
    """Integer tokens (b t) through an embedding table of `count` rows."""

    count: int


@dataclass(frozen=True)
class Vectors:
    """Vectors (b t size) through a linear map."""

    size: int
    bias: bool = True


@dataclass(frozen=True)
class Logits:
    """`count` logits per position; `tied` reuses the token table, `scaled` divides by sqrt(width) (the HYLA paper's
    LM)."""

    count: int
    bias: bool = False
    tied: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Values:
    """`size` real numbers per position."""

    size: int = 1
    bias: bool = True
