"""Shared by tasks: losses and scores of outputs, and scores of baselines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from polyhead.tasks.base import Batch, Task, check_split


@runtime_checkable
class LazyLogitsLike(Protocol):
    """Logits (b t c) that are never stored as a whole: what a task may use of them."""

    def cross_entropy(self, targets: Tensor) -> Tensor:
        """Cross-entropy (b t) in nats at `targets` (b t)."""

    def argmax(self) -> Tensor:
        """The most likely class (b t) at each position, or -1 where a logit is NaN."""


def token_losses(outputs: Tensor | LazyLogitsLike, targets: Tensor) -> Tensor:
    """Cross-entropy (b t) in nats of logits (b t c) at `targets` (b t), in at least float32."""
    if isinstance(outputs, Tensor):
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return outputs.cross_entropy(targets)


def token_guesses(outputs: Tensor | LazyLogitsLike) -> Tensor:
    """The most likely class (b t) at each position, or -1 where a logit is NaN: for `argmax` NaN is the largest."""
    if not isinstance(outputs, Tensor):
        return outputs.argmax()
    best, guess = outputs.max(dim=-1)
    return guess.masked_fill(best.isnan(), -1)


@dataclass(frozen=True)
class Score:
    """A metric over `count` sequences: its mean and the standard error of that mean.

    `Score(mean)` is a number that no sampling made, such as chance.
    """

    mean: float
    standard_error: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, values: Tensor, *, amounts: Tensor | None = None) -> "Score":
        """The score from per-sequence `values` (b).

        `amounts` (b): what each counts in the mean, Σ w x / Σ w.  Its standard error is that of a ratio of two sums,
        sqrt(n / (n - 1) Σ w² (x - mean)²) / Σ w.  Cochran 1977, section 6.4.
        """
        values = values.double()
        count = len(values)
        if amounts is not None and amounts.shape != values.shape:  # they would be broadcast
            raise ValueError(f"Score: amounts must be {tuple(values.shape)} but are {tuple(amounts.shape)}")
        if amounts is None or (amounts == amounts[:1]).all():
            # Equal amounts give the plain mean to the last bit.
            mean = values.mean()
            deviations = values - mean
        else:
            weights = amounts.double() / amounts.double().mean()
            mean = (weights * values).mean()
            deviations = weights * (values - mean)
        standard_error = math.nan  # a single value has none
        if count > 1:
            standard_error = (deviations.square().sum() / (count - 1)).sqrt().item() / count**0.5
        return cls(mean.item(), standard_error, count)

    @classmethod
    def over(cls, scores: Sequence["Score"]) -> "Score":
        """The mean over several random splits, with an error that covers the choice of splits and of sequences.

        With k splits, means m_i and standard errors e_i, m_i has the variance u² + e_i², where u² is the variance
        between splits.  s² = Σ (m_i - m)² / (k - 1) estimates mean(e²) + u², so the variance of the mean is
        max(s², mean(e²)) / k.
        """
        if len(scores) == 1:
            return scores[0]
        k = len(scores)
        mean = sum(score.mean for score in scores) / k
        between, within, count = 0.0, 0.0, 0
        for score in scores:
            between += (score.mean - mean) ** 2 / (k - 1)
            within += score.standard_error**2 / k
            count += score.count
        return cls(mean, math.sqrt(max(between, within) / k), count)


def check_baselines(task: Task, split: str, sequences: int) -> None:
    """Raise a ValueError unless `task` has the split and there are sequences to score."""
    check_split(task, split)
    if sequences < 1:
        raise ValueError(f"baselines: sequences must be at least 1 but is {sequences}")


def scores_in_parts(
    score: Callable[[Batch], dict[str, Tensor]], task: Task, split: str, sequences: int, seed: int, *, size: int
) -> dict[str, Score]:
    """Scores over `sequences` sequences of stream `seed`; `score` gives the values (b) of `size` sequences, by name."""
    check_baselines(task, split, sequences)
    parts: dict[str, list[Tensor]] = {}
    for step, start in enumerate(range(0, sequences, size)):
        batch = task.batch(split, min(size, sequences - start), seed=seed, step=step)
        for name, values in score(batch).items():
            parts.setdefault(name, []).append(values)
    return {name: Score.of(torch.cat(values)) for name, values in parts.items()}


def check_logits(task: Task, outputs: Tensor, batch: Batch, count: int) -> Tensor:
    """Logits (b t c) in at least float32.  Raises ValueError unless there are `count` for each target."""
    expected = (*batch.targets.shape, count)
    if outputs.shape != expected:
        raise ValueError(f"{type(task).__name__}: outputs must be logits {expected} but have {tuple(outputs.shape)}")
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def right_tokens(logits: Tensor, targets: Tensor, element: str) -> dict[str, Tensor]:
    """For each sequence (b): `accuracy`, 1 if the largest logit is the target everywhere, and `element`, its share."""
    right = token_guesses(logits) == targets
    return {
        "accuracy": right.all(dim=-1).to(logits.dtype),
        element: right.to(logits.dtype).mean(dim=-1),
    }
