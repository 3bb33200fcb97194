"""How the next token is chosen: the likeliest, or a draw from probabilities that are sharpened and cut first.

    p_n = softmax_n(logits / temperature), then only the `top_k` likeliest, then only the nucleus, both made to add up
    to 1 again;  the token is the first n with p_1 + ... + p_n > u, for u uniform in [0, 1)

The nucleus is the smallest set of the likeliest tokens that holds at least `top_p` (Holtzman et al. 2020, "The curious
case of neural text degeneration"); of equally likely tokens those of lower number come first, in it and in the top k.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

STREAM = 2**62
"""Streams of rows begin below this number."""


@dataclass(frozen=True)
class Choice:
    """`temperature` 0: the likeliest token; `top_k`, `top_p` None: no token is cut.

    >>> logits, draws = torch.tensor([[2.0, 3.0, 3.0, 1.0]]).expand(4, 4), torch.tensor([0.0, 0.2, 0.6, 0.99])
    >>> Choice()(logits, draws), Choice(top_k=2)(logits, draws), Choice(temperature=0.0)(logits, draws)
    (tensor([0, 1, 2, 3]), tensor([1, 1, 2, 2]), tensor([1, 1, 1, 1]))

    ValueError for a temperature below 0, a top_k below 1, a top_p outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"generate: temperature must be at least 0 but is {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"generate: top_k must be at least 1, or None, but is {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"generate: top_p must be above 0 and at most 1, or None, but is {self.top_p}")

    def __call__(self, logits: Float[Tensor, "b c"], draws: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
        """The tokens that uniform draws from [0, 1) choose.  ValueError where logits are no numbers."""
        best, first = logits.max(-1)
        if not bool(torch.isfinite(best).all()):
            raise ValueError("generate: the model's logits are not finite numbers")
        if self.temperature == 0.0:
            return first
        p = self.probabilities(logits)
        sums = p.cumsum(-1)
        # Scaled by what they add up to, a draw is below the last sum, but for rounding: then it means the last token.
        beyond = (sums <= draws.to(p)[:, None] * sums[:, -1:]).sum(-1)
        last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)
        return torch.minimum(beyond, last)

    def probabilities(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """What each token is drawn with; in float64, where the device has it."""
        wide = logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)
        p = ((wide - wide.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p is None:
            return p
        falling, order = p.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            falling[:, self.top_k :] = 0.0
            falling /= falling.sum(-1, keepdim=True)
        if self.top_p is not None:  # a token stays if those before it do not hold top_p yet
            before = falling.cumsum(-1) - falling
            falling = falling.masked_fill(before >= self.top_p, 0.0)
        kept = torch.zeros_like(p).scatter(-1, order, falling)
        return kept / kept.sum(-1, keepdim=True)


def row_draws(rows: int, steps: int, generator: torch.Generator | None = None) -> Float[Tensor, "b t"]:
    """Uniform draws of each row and step, on the CPU.  Row i has a stream of its own, whatever other rows there are;
    `generator` (default: torch's own) says where the streams begin."""
    device = "cpu" if generator is None else generator.device
    start = int(torch.randint(STREAM, (), generator=generator, device=device))
    streams = (torch.Generator().manual_seed(start + row) for row in range(rows))
    return torch.stack([torch.rand(steps, generator=stream, dtype=torch.float64, device="cpu") for stream in streams])
