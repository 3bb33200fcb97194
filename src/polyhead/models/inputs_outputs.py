"""The inputs and outputs of a model: modules from tokens, vectors or images to the model width, and from it to logits,
values or classes."""

from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead import config
from polyhead.layers.device import Placement
from polyhead.layers.norms import LayerNorm
from polyhead.layers.positions import LearnedPositions, SinusoidalPositions
from polyhead.layers.projection import plain
from polyhead.ops.cross_entropy import chunked_cross_entropy, chunked_guesses
from polyhead.ops.latent_code import at_least_float32
from polyhead.ops.precision import product_dtype


class TokenInput(nn.Module):
    """Tokens (b t) through an embedding table of `count` rows; `scaled` multiplies them by sqrt(dim).

    Embeddings (b t m), from the table or not, may be given instead of tokens.
    """

    def __init__(self, end: config.Tokens, dim: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.factor = 1.0
        if end.scaled:
            self.factor = dim**0.5
        self.table = nn.Embedding(end.count, dim, **placement)

    def forward(self, tokens: Tensor) -> Float[Tensor, "b t m"]:
        if tokens.ndim == 3 and tokens.is_floating_point() and tokens.shape[-1] == self.table.embedding_dim:
            return self._scaled(tokens)
        if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64):
            got = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise ValueError(f"Transformer: inputs must be integer tokens (b t) of int32 or int64, got {got}")
        try:
            return self._scaled(self.table(tokens))
        except IndexError:  # checked only after a failure: reading tokens would synchronise the device
            count = self.table.num_embeddings
            strange = tokens[(tokens < 0) | (tokens >= count)][0].item()
            raise ValueError(f"Transformer: tokens must be 0 to {count - 1}, got {strange}") from None

    def _scaled(self, x: Tensor) -> Tensor:
        if self.factor == 1.0:
            return x
        return x * self.factor


class VectorInput(nn.Module):
    """Vectors (b t size) through a linear map."""

    def __init__(self, end: config.Vectors, dim: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.size = end.size
        self.linear = nn.Linear(end.size, dim, bias=end.bias, **placement)

    def forward(self, vectors: Float[Tensor, "..."]) -> Float[Tensor, "b t m"]:
        if vectors.ndim != 3 or vectors.shape[-1] != self.size:
            raise ValueError(f"Transformer: inputs must be (b t {self.size}), got {tuple(vectors.shape)}")
        return self.linear(vectors)


class PatchInput(nn.Module):
    """Images (b c height width), cut into patches, through a linear map: one token per patch, row by row.

    A patch is the vector of its pixels, row by row; the channels of a pixel are adjacent.

    >>> PatchInput(Patches((3, 36, 36), (12, 12), class_token=True), 64)(torch.randn(2, 3, 36, 36)).shape
    torch.Size([2, 10, 64])

    Args:
        end: With `norm`, there are LayerNorms before and after the map.  With `class_token`, a learned token stands
            before all patches.
    """

    def __init__(self, end: config.Patches, dim: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.image, self.patch = end.image, end.patch
        size = end.image[0] * end.patch[0] * end.patch[1]
        self.norm: nn.Module = nn.Identity()
        if end.norm:
            self.norm = LayerNorm(size, **placement)
        self.linear = nn.Linear(size, dim, **placement)
        self.norm_out: nn.Module = nn.Identity()
        if end.norm:
            self.norm_out = LayerNorm(dim, **placement)
        self.class_token: nn.Embedding | None = None
        if end.class_token:
            self.class_token = nn.Embedding(1, dim, **placement)

    def forward(self, images: Float[Tensor, "..."]) -> Float[Tensor, "b t m"]:
        if tuple(images.shape[1:]) != self.image or not images.is_floating_point():
            got = f"{images.dtype} {tuple(images.shape)}"
            expected = ", ".join(map(str, self.image))
            raise ValueError(f"Transformer: images (b c height width) must be floating (b, {expected}), got {got}")
        p, q = self.patch
        patches = images.unflatten(3, (-1, q)).unflatten(2, (-1, p))  # (b c row p column q)
        pixels = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (b t p*q*c)
        x = self.norm_out(self.linear(self.norm(pixels)))
        if self.class_token is None:
            return x
        first = self.class_token(torch.zeros(1, 1, dtype=torch.long, device=x.device))
        return torch.cat((first.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)


class LazyLogits:
    """Logits factor (x weight' + bias) (b t c) of a stream x (b t m), which are never stored as a whole.

    >>> model = Transformer(TransformerConfig(Tokens(9), Logits(9), dim=8, causal=True))
    >>> lazy = model(torch.randint(9, (2, 5)), lazy=True)
    >>> lazy.cross_entropy(torch.randint(9, (2, 5))).shape, lazy.argmax().shape
    (torch.Size([2, 5]), torch.Size([2, 5]))

    The dtype of the products is that of autocast when the object is created.  Parameters are read when the loss or the
    argmax is computed, so compute them before the parameters are updated.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, factor: float = 1.0) -> None:
        dtype = product_dtype(x)
        self.x, self.weight, self.factor = x.to(dtype), weight.to(dtype), factor
        self.bias = None if bias is None else bias.to(dtype)
        self.scored: tuple[Tensor, int, Tensor, Tensor] | None = None

    def cross_entropy(self, targets: Int[Tensor, "b t"]) -> Float[Tensor, "b t"]:
        """The cross entropy of each of `targets`, in nats."""
        # With gradients each call needs its own graph.  Without, one pass gives losses and classes, for both methods.
        if torch.is_grad_enabled():
            return chunked_cross_entropy(*self._given(targets), factor=self.factor).view(targets.shape)
        return self._score(targets)[0]

    def argmax(self) -> Int[Tensor, "b t"]:
        """The most likely class of each position, or -1 where a logit is NaN."""
        with torch.no_grad():
            if self.scored is not None:
                return self.scored[3]
            # The most likely classes depend on no targets, so zeros stand in for them.
            return self._score(self.x.new_zeros(self.x.shape[:-1], dtype=torch.long))[1]

    def _score(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and most likely classes.  They are kept with their targets, because loss and metrics need both."""
        version = -1  # of inference tensors it is not known, so they are scored anew
        if not targets.is_inference():
            version = targets._version  # how often they were changed in place
        if version < 0 or self.scored is None or self.scored[0] is not targets or self.scored[1] != version:
            losses, classes = chunked_guesses(*self._given(targets), factor=self.factor)
            self.scored = targets, version, losses.view(targets.shape), classes.view(targets.shape)
        return self.scored[2], self.scored[3]

    def _given(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        if targets.shape != self.x.shape[:-1]:
            expected, shape = tuple(self.x.shape[:-1]), tuple(targets.shape)
            raise ValueError(f"LazyLogits: targets (b t) must be {expected}, got {shape}")
        return self.x.flatten(0, 1), self.weight, self.bias, targets.flatten()


class LinearOutput(nn.Module):
    """`size` numbers per position: logits, or real values."""

    def __init__(self, dim: int, size: int, *, bias: bool = True, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, size, bias=bias, **placement)

    @property
    def weight(self) -> Tensor:
        """[class, width]."""
        return self.linear.weight

    def forward(self, x: Float[Tensor, "b t m"]) -> Float[Tensor, "b t c"]:
        return self.linear(x)

    def lazy(self, x: Float[Tensor, "b t m"]) -> LazyLogits | Float[Tensor, "b t c"]:
        """`forward` without storing all logits; a wrapped map (LoRA) has no single weight and gives plain logits."""
        if not plain(self.linear):
            return self(x)
        return LazyLogits(x, self.linear.weight, self.linear.bias)


class SharedTable(nn.Module):
    """The parameter of a token table at a second place.

    The module itself must not stand at two places: `torch.func.functional_call` would leave the given tensors in it.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight: Tensor = weight


class TiedOutput(nn.Module):
    """Logits by the token table itself; `scaled` divides them by sqrt(width).

    A parametrised table (`weight_norm`) works, but it leaves its earlier weight here, without a gradient.  Where that
    is an error (DistributedDataParallel), freeze it: `model.outputs.weight.requires_grad_(False)`.
    """

    bias = None  # other libraries ask the map to the logits for it

    def __init__(self, source: TokenInput, *, scaled: bool = False) -> None:
        super().__init__()
        self.table = SharedTable(source.table.weight)
        self.source = (source,)  # a tuple, so that its parameters are not listed twice
        self.factor = 1.0
        if scaled:
            self.factor = source.table.embedding_dim**-0.5
        self.register_state_dict_pre_hook(TiedOutput.tie)

    @property
    def weight(self) -> Tensor:
        """[token, width]: the table itself."""
        return self.table.weight

    def forward(self, x: Float[Tensor, "b t m"]) -> Float[Tensor, "b t c"]:
        return F.linear(x, self._embeddings()) * self.factor

    def lazy(self, x: Float[Tensor, "b t m"]) -> LazyLogits:
        """`forward` without storing all logits."""
        return LazyLogits(x, self._embeddings(), factor=self.factor)

    def tie(self, *_: object) -> None:
        """Take the parameter of the token table again: off the meta device, and by `assign=True`, each got its own.  It
        may also have been replaced; saved beside it, the old one would be loaded in its place."""
        table = self.source[0].table
        if isinstance(table, nn.Embedding) and isinstance(table.weight, nn.Parameter):
            self.table.weight = table.weight

    def _embeddings(self) -> Tensor:
        """The embeddings of all tokens: for a wrapped table (LoRA) they differ from its weight."""
        table = self.source[0].table
        # A wrapper may add to the weight in its `forward`, so it is called with all tokens (c,) for the rows (c m).
        if type(table).forward is not nn.Embedding.forward:
            weight: Tensor = getattr(table, "weight", self.weight)  # for its count; a user's wrapper may have none
            return table(torch.arange(len(weight), device=weight.device))
        return table.weight


class ClassOutput(nn.Module):
    """`count` logits per sequence, (b 1 count), from the mean over its real tokens or, with `pool="class"`, the first
    of them."""

    def __init__(self, end: config.Classes, dim: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.pool = end.pool
        self.linear = nn.Linear(dim, end.count, bias=end.bias, **placement)

    def forward(self, x: Float[Tensor, "b t m"], mask: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, "b 1 c"]:
        if self.pool == "class":
            return self.linear(first_of_tokens(x, mask))
        return self.linear(mean_of_tokens(x, mask))


def check_mask(caller: str, name: str, mask: Tensor | None, x: Tensor | None) -> None:
    """Raise ValueError unless `mask` is that of all tokens of `x` (b t m): one column would be read as all of them."""
    if mask is not None and x is not None and mask.shape != x.shape[:2]:
        expected, shape = tuple(x.shape[:2]), tuple(mask.shape)
        raise ValueError(f"{caller}: {name} must have one entry for each token, {expected}, but is {shape}")


def mean_of_tokens(x: Float[Tensor, "b t m"], mask: Bool[Tensor, "b t"] | None) -> Float[Tensor, "b 1 m"]:
    """The mean over the real tokens of a sequence (`mask` is True), summed in at least float32; 0 if there are none."""
    if mask is None and x.shape[1]:
        return x.mean(1, keepdim=True)
    if mask is None:
        return x.sum(1, keepdim=True)
    total = x.masked_fill(~mask[..., None], 0.0).sum(1, keepdim=True, dtype=at_least_float32(x.dtype))
    return (total / mask.sum(1).clamp(min=1)[:, None, None]).to(x.dtype)


def first_of_tokens(x: Float[Tensor, "b t m"], mask: Bool[Tensor, "b t"] | None) -> Float[Tensor, "b 1 m"]:
    """The first real token of a sequence (`mask` is True); token 0 if there are none, and 0 without any token."""
    if x.shape[1] == 0:
        return x.sum(1, keepdim=True)
    if mask is None:
        return x[:, :1]
    # Of equal values argmax takes the first: the index of the first True, or 0 if there is none.
    return x.gather(1, mask.int().argmax(1)[:, None, None].expand(-1, 1, x.shape[-1]))


InputEnd = TokenInput | VectorInput | PatchInput
OutputEnd = LinearOutput | TiedOutput | ClassOutput


def build_input(end: config.Input, dim: int, **placement: Unpack[Placement]) -> InputEnd:
    """The input module of a configuration."""
    if isinstance(end, config.Tokens):
        return TokenInput(end, dim, **placement)
    if isinstance(end, config.Patches):
        return PatchInput(end, dim, **placement)
    return VectorInput(end, dim, **placement)


def input_positions(
    settings: config.TransformerConfig, **placement: Unpack[Placement]
) -> LearnedPositions | SinusoidalPositions | None:
    """The module of positions that are added to the inputs, or None."""
    if isinstance(settings.positions, config.Learned):
        return LearnedPositions(settings.max_length, settings.dim, **placement)
    if isinstance(settings.positions, config.Sinusoidal):
        return SinusoidalPositions(settings.max_length, settings.dim, **placement)
    return None


def build_output(end: config.Output, source: InputEnd, dim: int, **placement: Unpack[Placement]) -> OutputEnd:
    """The output module of a configuration; tied logits share the table of the input module `source`.

    Raises:
        ValueError: If tied logits find no table in `source`, or one of another size, or have a bias; if others are
            scaled.
    """
    if isinstance(end, config.Logits) and end.tied:
        if not isinstance(source, TokenInput) or source.table.num_embeddings != end.count:
            raise ValueError(f"Transformer: tied logits need Tokens({end.count}) as inputs")
        if end.bias:
            raise ValueError("Transformer: the token table as the map of logits has no bias, so tied needs bias=False")
        return TiedOutput(source, scaled=end.scaled)
    if isinstance(end, config.Logits) and end.scaled:
        raise ValueError("Transformer: scaled is for logits by the token table, so it needs tied=True")
    if isinstance(end, config.Classes):
        return ClassOutput(end, dim, **placement)
    size = end.count if isinstance(end, config.Logits) else end.size
    return LinearOutput(dim, size, bias=end.bias, **placement)
