"""How the next token is chosen: the most likely one, or a sample with temperature, top-k and top-p.

    p_n = softmax_n(logits / temperature), cut to the `top_k` most likely, then to the nucleus, each renormalised;
    the token is the first n with p_1 + ... + p_n > u, for u uniform in [0, 1)

The nucleus is the smallest set of most likely tokens whose probability is at least `top_p` (Holtzman et al. 2020, "The
curious case of neural text degeneration").  In both cuts, equally likely tokens are ordered by their index.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.spec.shapes import check_count

# The seeds of the rows' random streams are below this number.
STREAM = 2**62


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen: the most likely one, or a sample from the cut distribution.

    >>> logits, draws = torch.tensor([[2.0, 3.0, 3.0, 1.0]]).expand(4, 4), torch.tensor([0.0, 0.2, 0.6, 0.99])
    >>> SamplingOptions()(logits, draws), SamplingOptions(top_k=2)(logits, draws)
    (tensor([0, 1, 2, 3]), tensor([1, 1, 2, 2]))
    >>> SamplingOptions(temperature=0.0)(logits, draws)
    tensor([1, 1, 1, 1])

    Attributes:
        temperature: With 0 the most likely token is chosen.
        top_k: How many of the most likely tokens may be chosen; None: no cut.
        top_p: The least probability of the nucleus; None: no cut.

    Raises:
        ValueError: For a negative or infinite temperature, a top_k that is not positive, or a top_p outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"generate: temperature must be at least 0 but is {self.temperature}")
        if self.top_k is not None:
            check_count("generate", "top_k", self.top_k)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"generate: top_p must be above 0 and at most 1, or None, but is {self.top_p}")

    def __call__(self, logits: Float[Tensor, "b c"], draws: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        """The tokens chosen by uniform draws from [0, 1).  Raises ValueError for logits that are not finite."""
        best, first = logits.max(-1)  # (b) each
        if not bool(torch.isfinite(best).all()):
            raise ValueError("generate: the model's logits are not finite numbers")
        if self.temperature == 0.0:
            return first
        p = self.probabilities(logits)
        sums = p.cumsum(-1)  # (b c)
        # Scaled by the total, a draw is below the last sum, except for rounding; then it chooses the last token.
        beyond = (sums <= draws.to(p)[:, None] * sums[:, -1:]).sum(-1)
        last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)
        return torch.minimum(beyond, last)

    def probabilities(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """The probability of each token, in float64 if the device has it."""
        dtype = torch.float64
        if logits.device.type == "mps":  # it has no float64
            dtype = torch.float32
        wide = logits.to(dtype)
        # The largest logit is subtracted first: a quotient by a small temperature could be infinite.
        p = ((wide - wide.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p is None:
            return p
        falling, order = p.sort(dim=-1, descending=True, stable=True)  # (b c) each
        if self.top_k is not None:
            falling[:, self.top_k :] = 0.0
            falling /= falling.sum(-1, keepdim=True)
        if self.top_p is not None:  # a token stays if the more likely ones do not reach top_p
            before = falling.cumsum(-1) - falling
            falling = falling.masked_fill(before >= self.top_p, 0.0)
        weights = torch.zeros_like(p).scatter(-1, order, falling)
        return weights / weights.sum(-1, keepdim=True)


def row_draws(rows: int, steps: int, generator: torch.Generator | None = None) -> Float[Tensor, "b t"]:
    """Uniform draws for each row and step, on the CPU.  Row i has its own stream, independent of the other rows;
    `generator` (default: torch's own) seeds the streams."""
    if generator is None:
        generator = torch.default_generator
    start = int(torch.randint(STREAM, (), generator=generator, device=generator.device))
    draws = torch.empty(rows, steps, dtype=torch.float64, device="cpu")
    for row in range(rows):
        draws[row].uniform_(generator=torch.Generator().manual_seed(start + row))
    return draws
