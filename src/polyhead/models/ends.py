"""The two ends of the transformer: what turns tokens or vectors into the model width, and what turns it into an
answer."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead import config
from polyhead.layers import Device


class TokenInput(nn.Module):
    """Tokens (b t) through an embedding table of `count` rows."""

    def __init__(self, count: int, dim: int, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(count, dim, device=device, dtype=dtype)

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t m"]:
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(
                f"Transformer: integer tokens (b t) were wanted but {tokens.dtype} {tuple(tokens.shape)} came"
            )
        try:
            return self.table(tokens)
        except IndexError:  # looked at only now: reading tokens beforehand would wait for the device
            count = self.table.num_embeddings
            strange = tokens[(tokens < 0) | (tokens >= count)][0].item()
            raise ValueError(f"Transformer: tokens must be 0 to {count - 1} but {strange} came") from None


class VectorInput(nn.Module):
    """Vectors (b t size) through a linear map."""

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.linear = nn.Linear(size, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, vectors: Float[Tensor, "b t size"]) -> Float[Tensor, "b t m"]:
        if vectors.ndim != 3 or vectors.shape[-1] != self.size:
            raise ValueError(f"Transformer: inputs (b t {self.size}) were wanted but {tuple(vectors.shape)} came")
        return self.linear(vectors)


class LinearOutput(nn.Module):
    """`size` numbers per position: logits, or real values."""

    def __init__(
        self,
        dim: int,
        size: int,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b t m"]) -> Float[Tensor, "b t c"]:
        return self.linear(x)


class TiedOutput(nn.Module):
    """Logits by the token table itself; `scaled` divides them by sqrt(width)."""

    def __init__(self, source: TokenInput, *, scaled: bool = False) -> None:
        super().__init__()
        self.table = source.table
        self.factor = source.table.embedding_dim**-0.5 if scaled else 1.0

    def forward(self, x: Float[Tensor, "b t m"]) -> Float[Tensor, "b t c"]:
        return F.linear(x, self.table.weight) * self.factor


def build_input(
    end: config.Tokens | config.Vectors,
    dim: int,
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> TokenInput | VectorInput:
    """The module of an input end."""
    if isinstance(end, config.Tokens):
        return TokenInput(end.count, dim, device=device, dtype=dtype)
    return VectorInput(end.size, dim, bias=end.bias, device=device, dtype=dtype)


def build_output(
    end: config.Logits | config.Values,
    source: TokenInput | VectorInput,
    dim: int,
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> LinearOutput | TiedOutput:
    """The module of an output end; tied logits share the table of `source`.

    Raises ValueError where there is no such table, or one of another size.
    """
    if isinstance(end, config.Logits) and end.tied:
        if not isinstance(source, TokenInput) or source.table.num_embeddings != end.count:
            raise ValueError(f"Transformer: tied logits need Tokens({end.count}) as inputs")
        return TiedOutput(source, scaled=end.scaled)
    size = end.count if isinstance(end, config.Logits) else end.size
    return LinearOutput(dim, size, bias=end.bias, device=device, dtype=dtype)
