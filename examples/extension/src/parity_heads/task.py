"""Parity: is the number of ones odd?  Which sequences are held out is known beforehand."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import polyhead as ph


@dataclass(frozen=True)
class Parity(ph.Task):
    """The parity of `length` bits, asked at the last token.

    splits:  train, validation and iid draw sequences whose first two bits differ; compositional those where both are 1.
    """

    bits: int = 8

    name: ClassVar[str] = "parity"
    metric: ClassVar[str] = "accuracy"

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "validation", "iid", "compositional")

    @property
    def ends(self) -> tuple[ph.Tokens, ph.Logits]:
        return ph.Tokens(2), ph.Logits(2)

    @property
    def length(self) -> int:
        return self.bits

    @property
    def tail(self) -> int:
        return 1

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> ph.Batch:
        """A batch: inputs (b t) of bits, targets (b t) the parity up to each bit, of which the last is scored."""
        at = {"generator": generator, "device": generator.device}
        bits = torch.randint(2, (batch_size, self.bits), **at)
        bits[:, 1] = 1 - bits[:, 0] if split != "compositional" else 1
        if split == "compositional":
            bits[:, 0] = 1
        scored = torch.zeros_like(bits, dtype=torch.bool)
        scored[:, -1] = True
        return ph.Batch(bits, bits.cumsum(1) % 2, None, scored, {"ones": bits.sum(1)})

    def loss(self, outputs: Tensor, batch: ph.Batch) -> Tensor:
        """Cross-entropy at the last token."""
        return torch.nn.functional.cross_entropy(outputs[:, -1], batch.targets[:, -1])

    def metrics(self, outputs: Tensor, batch: ph.Batch) -> dict[str, Tensor]:
        """By sequence (b): whether the last token's class is right."""
        return {"accuracy": (outputs[:, -1].argmax(-1) == batch.targets[:, -1]).float()}
