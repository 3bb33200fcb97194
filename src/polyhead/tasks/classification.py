"""Shared by tasks with one class per sequence or image: loss and accuracy of (b 1 c) logits, and chance."""

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from polyhead.config import Classes
from polyhead.config.components import Input
from polyhead.spec.shapes import shaped
from polyhead.tasks.base import Baseline, Batch, Task
from polyhead.tasks.scores import Score, check_baselines, check_logits, token_guesses

ACCURACY = ("Accuracy", "The share of correct answers.")
CHANCE = Baseline("Chance", "draws every answer at random")
# The class names of a yes/no question: class 1 is yes.
ANSWERS = ("no", "yes")


def batch_of(inputs: Tensor, labels: Tensor, latents: dict[str, Tensor]) -> Batch:
    """A batch of `inputs` with one label (b) each."""
    scored = torch.ones(len(labels), 1, dtype=torch.bool, device=labels.device)
    return Batch(inputs, labels[:, None].long(), None, scored, latents)


def exact(right: Tensor) -> Score:
    """A baseline that is known exactly: its mean over all examples of the split (n)."""
    return Score(right.mean().item())


@dataclass(frozen=True)
class Classification(Task):
    """A task with one class for each sequence or image."""

    metric: ClassVar[str] = "accuracy"

    @property
    @abc.abstractmethod
    def ends(self) -> tuple[Input, Classes]:
        """The input and the output of a transformer for this task."""

    @shaped
    def loss(self, outputs: Float[Tensor, "b 1 c"], batch: Batch) -> Float[Tensor, ""]:
        """Mean cross-entropy."""
        return F.cross_entropy(check_logits(self, outputs, batch, self.ends[1].count)[:, 0], batch.targets[:, 0])

    @shaped
    def metrics(self, outputs: Float[Tensor, "b 1 c"], batch: Batch) -> dict[str, Float[Tensor, "b"]]:
        """`accuracy` (b): 1 where the largest logit is the label's."""
        logits = check_logits(self, outputs, batch, self.ends[1].count)
        return {"accuracy": (token_guesses(logits) == batch.targets)[:, 0].to(logits.dtype)}

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """The exact score of guessing with all classes equally likely."""
        check_baselines(self, split, sequences)
        return {"chance": Score(1 / self.ends[1].count)}
