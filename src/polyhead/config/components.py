"""The parts of a model around its heads, as frozen dataclasses: positions, feed-forward layers, inputs and outputs."""

from dataclasses import dataclass
from typing import Annotated

from polyhead.spec import ACTS, LAYOUTS
from polyhead.spec.checked import Amount, Checked, Closed, Count, Positive, choice

__all__ = ["Alibi", "Classes", "Experts", "FeedForward", "Input", "Learned", "Logits", "Mlp", "Output", "Patches"]
__all__ += ["Position", "RelativeBias", "Rotary", "Sinusoidal", "Swiglu", "Tokens", "Values", "Vectors"]


# ------------------------------------------------------------------------------------------------------------ positions
Act = Annotated[str, choice(ACTS)]


@dataclass(frozen=True)
class Rotary(Closed):
    """Rotary embedding of q and k.

    Attributes:
        theta: Base of the frequencies: pair j turns by position * theta^(-2j/d).
        layout: "interleaved" rotates the pairs (2j, 2j+1), "half" the pairs (j, j + d/2).
    """

    theta: Positive = 1e4
    layout: Annotated[str, choice(LAYOUTS)] = "interleaved"


@dataclass(frozen=True)
class RelativeBias(Closed):
    """T5 relative bias, one table per layer; the nearer half of distances has a bucket each, others are logarithmic.

    Attributes:
        buckets: Rows of the table; None: as many as positions, as in the HYLA paper's code.
        max_distance: Beyond the nearer half, larger distances share a bucket; None: the number of positions.
        bidirectional: Keys after the query have buckets of their own; else they share bucket 0.
    """

    buckets: Count | None = None
    max_distance: Count | None = None
    bidirectional: bool = False


@dataclass(frozen=True)
class Alibi(Closed):
    """Attention with linear biases: score - slope_h |i - j| (Press et al. 2022)."""


@dataclass(frozen=True)
class Learned(Closed):
    """A learned vector per position, added to the inputs of the first layer."""


@dataclass(frozen=True)
class Sinusoidal(Closed):
    """Sines and cosines of the position, added to the inputs of the first layer (Vaswani et al. 2017)."""


Position = Rotary | RelativeBias | Alibi | Learned | Sinusoidal


# -------------------------------------------------------------------------------------------------- feed-forward layers
@dataclass(frozen=True)
class Mlp(Closed):
    """Two linear maps with an activation between them.

    Attributes:
        hidden: Width between the maps; None: 4 x width of the model.
        act: identity, relu, gelu, gelu_tanh or silu.
    """

    hidden: Count | None = None
    act: Act = "gelu"
    bias: bool = True


@dataclass(frozen=True)
class Swiglu(Closed):
    """W2(silu(W1 x) * W3 x).

    Attributes:
        hidden: Rows of W1 and W3; None: the multiple of 64 nearest to 8/3 width of the model.
    """

    hidden: Count | None = None
    bias: bool = False


@dataclass(frozen=True)
class Experts(Closed):
    """Mixture of expert MLPs: the top k of a linear gate without noise, weighted by the softmax over those k.

    Attributes:
        experts: How many experts there are.
        top_k: How many experts a token has.
        hidden: Hidden width of an expert; None: 4 x width of the model.
        act: identity, relu, gelu, gelu_tanh or silu.
        balance: Weight of the loss that balances the load.
    """

    experts: Count = 4
    top_k: Count = 2
    hidden: Count | None = None
    act: Act = "gelu"
    bias: bool = True
    balance: Amount = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            raise ValueError(f"Experts: top_k must be at most {self.experts} (experts) but is {self.top_k}")


FeedForward = Mlp | Swiglu | Experts


# --------------------------------------------------------------------------------------------------------------- inputs
@dataclass(frozen=True)
class Tokens(Checked):
    """Integer tokens (b t) through an embedding table.

    Attributes:
        count: Size of the vocabulary.
        scaled: Multiply the embeddings by sqrt(width).
    """

    count: Count
    scaled: bool = False


@dataclass(frozen=True)
class Vectors(Checked):
    """Vectors (b t size) through a linear map."""

    size: Count
    bias: bool = True


@dataclass(frozen=True)
class Patches(Checked):
    """Images (b c height width) cut into patches, each through a linear map: one token per patch, row by row.

    Attributes:
        image: Channels, height and width of an image.
        patch: Height and width of a patch.
        norm: LayerNorms before and after the map.
        class_token: A learned token before all patches.
    """

    image: tuple[Count, Count, Count]
    patch: tuple[Count, Count]
    norm: bool = False
    class_token: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image[1] % self.patch[0] or self.image[2] % self.patch[1]:
            patch, image = " x ".join(map(str, self.patch)), " x ".join(map(str, self.image[1:]))
            raise ValueError(f"Patches: patches of {patch} do not divide an image of {image} (height x width)")

    @property
    def count(self) -> int:
        """The number of tokens of an image."""
        return (self.image[1] // self.patch[0]) * (self.image[2] // self.patch[1]) + self.class_token


Input = Tokens | Vectors | Patches


# -------------------------------------------------------------------------------------------------------------- outputs
@dataclass(frozen=True)
class Logits(Checked):
    """Logits at each position.

    Attributes:
        count: Size of the vocabulary.
        tied: Use the token table as the map.
        scaled: Divide the logits by sqrt(width), as HYLA's code does.
    """

    count: Count
    bias: bool = False
    tied: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Values(Checked):
    """Real numbers at each position, `size` of them."""

    size: Count = 1
    bias: bool = True


@dataclass(frozen=True)
class Classes(Checked):
    """Logits of a sequence, (b 1 count).

    Attributes:
        count: Number of classes.
        pool: "mean" reads the mean over all tokens, "class" the first token.
    """

    count: Count
    pool: Annotated[str, choice(("mean", "class"))] = "mean"
    bias: bool = True


Output = Logits | Values | Classes
