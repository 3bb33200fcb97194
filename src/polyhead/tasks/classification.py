"""What tasks that put a whole sequence or image into a class share: loss and accuracy of (b 1 c) logits, and chance."""

import torch
from torch import Tensor
from torch.nn import functional as F

from polyhead.config import Batch, Task
from polyhead.config.words import Floor
from polyhead.tasks.task import Score, check_split

ACCURACY = ("Accuracy", "The share of answers that are right.")
CHANCE = Floor("Chance", "draws every answer at random")
ANSWERS = ("no", "yes")
"""Of a question: class 1 is yes."""


def batch_of(inputs: Tensor, labels: Tensor, latents: dict[str, Tensor]) -> Batch:
    """A batch of `inputs` with one label (b) each."""
    scored = torch.ones(len(labels), 1, dtype=torch.bool, device=labels.device)
    return Batch(inputs, labels[:, None].long(), None, scored, latents)


def cross_entropy(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of logits (b 1 c)."""
    logits, labels = _logits(task, outputs, batch)
    return F.cross_entropy(logits, labels)


def accuracy(task: Task, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """`accuracy` (b): 1 where the largest logit is the label's."""
    logits, labels = _logits(task, outputs, batch)
    return {"accuracy": (logits.argmax(dim=-1) == labels).to(logits.dtype)}


def floors(task: Task, split: str) -> dict[str, Score]:
    """What guessing scores, every class as likely as any other: exactly."""
    check_split(task, split)
    return {"chance": Score(1 / task.ends[1].count, 0.0, 0)}  # type: ignore[union-attr]


def exact(right: Tensor) -> Score:
    """A floor that is known exactly: its mean over all that the split has (n)."""
    return Score(right.mean().item(), 0.0, 0)


checked = check_split


def _logits(task: Task, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (b c) in at least float32 and labels (b)."""
    wanted = (*batch.targets.shape, task.ends[1].count)  # type: ignore[union-attr]
    if outputs.shape != wanted:
        raise ValueError(f"{type(task).__name__}: outputs must be logits {wanted} but have {tuple(outputs.shape)}")
    logits = outputs[:, 0].to(torch.promote_types(outputs.dtype, torch.float32))
    return logits, batch.targets[:, 0]
