"""What tasks share: named streams within a draw, random splits, checks of splits and of outputs, the score of a
baseline."""

import hashlib
import importlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from polyhead.config import Batch, Task, stream
from polyhead.spec.shapes import one_of

Item = TypeVar("Item")


@runtime_checkable
class LazyLogits(Protocol):
    """Logits (b t c) that are never made as a whole: what a task may ask of them, of every position."""

    def cross_entropy(self, targets: Tensor) -> Tensor:
        """Nats that each of `targets` (b t) costs: (b t)."""

    def argmax(self) -> Tensor:
        """The likeliest class of each position: (b t)."""


def token_losses(outputs: Tensor | LazyLogits, targets: Tensor) -> Tensor:
    """Nats that each of `targets` (b t) costs under logits (b t c): (b t)."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return outputs.cross_entropy(targets)


def token_guesses(outputs: Tensor | LazyLogits) -> Tensor:
    """The likeliest class of each position: (b t)."""
    return outputs.argmax(-1) if isinstance(outputs, Tensor) else outputs.argmax()


def beside(task: str, file: str) -> ModuleType:
    """A file of the folder in which the module `task` lies: floors know their task, it knows their place alone."""
    return importlib.import_module(f"{task.rpartition('.')[0]}.{file}")


@dataclass(frozen=True)
class Score:
    """A metric over `count` sequences: its mean and the standard error of that mean.

    `identified`: of an exact ceiling only, the fraction of sequences whose context leaves a single function.
    """

    mean: float
    standard_error: float
    count: int
    identified: float | None = None

    @classmethod
    def of(cls, values: Tensor, identified: float | None = None) -> "Score":
        """The score of per-sequence `values` (b)."""
        values = values.double()
        error = values.std(correction=1) / len(values) ** 0.5 if len(values) > 1 else torch.tensor(float("nan"))
        return cls(values.mean().item(), error.item(), len(values), identified)

    @classmethod
    def over(cls, scores: Sequence["Score"]) -> "Score":
        """Of several random splits: the mean, for splits and sequences that were drawn at random.

        With k splits of means m_i and standard errors e_i the variance of m_i is that of splits, u² >= 0, plus e_i².
        The spread of the means, s² = Σ (m_i - m)² / (k - 1), estimates mean(e²) + u², so that the mean's own variance
        is max(s², mean(e²)) / k: 0.6 ± 0.3 and 1.0 ± 0.1 have s² = 0.08, mean(e²) = 0.05, and come to 0.8 ± 0.2.
        """
        if len(scores) == 1:
            return scores[0]
        k, mean = len(scores), sum(score.mean for score in scores) / len(scores)
        spread = sum((score.mean - mean) ** 2 for score in scores) / (k - 1)
        noise = sum(score.standard_error**2 for score in scores) / k
        shares = [score.identified for score in scores if score.identified is not None]
        identified = sum(shares) / k if len(shares) == k else None
        return cls(mean, math.sqrt(max(spread, noise) / k), sum(score.count for score in scores), identified)


def check_split(task: Task, split: str) -> str:
    """`split` if `task` has it; otherwise a ValueError that lists those it has, the nearest first."""
    return one_of(type(task).__name__, "split", split, task.splits)


def check_integers(task: Task, least: dict[str, int]) -> None:
    """Raise a ValueError unless each field in `least` is an integer and at least that."""
    for field, bound in least.items():
        value = getattr(task, field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{type(task).__name__}: {field} must be an integer but is {value!r}")
        if value < bound:
            raise ValueError(f"{type(task).__name__}: {field} must be at least {bound} but is {value}")


def check_draw(task: Task, split: str, batch_size: int) -> None:
    """Raise a ValueError unless `task` can draw `batch_size` sequences of `split`."""
    check_split(task, split)
    if batch_size < 1:
        raise ValueError(f"{type(task).__name__}: batch_size must be at least 1 but is {batch_size}")


def check_outputs(task: Task, outputs: Tensor, batch: Batch) -> None:
    """Raise a ValueError unless outputs and targets have one shape (a difference would broadcast to a wrong loss)."""
    if outputs.shape != batch.targets.shape:
        wanted, came = tuple(batch.targets.shape), tuple(outputs.shape)
        raise ValueError(f"{type(task).__name__}: outputs must have the targets' shape {wanted} but have {came}")


def fork(generator: torch.Generator, name: str) -> torch.Generator:
    """A generator for one consumer of randomness, named `name`, on the same device.

    Forks of one state under two names share no draws: a validation split drawn from a generator in the same state as
    training is still new data.  `generator` is left as it was; call `advance` when all forks of a draw are taken.
    """
    # A state lives in CPU memory for every kind of device, so reading it never waits for an accelerator.
    state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()
    return torch.Generator(generator.device).manual_seed(stream(0, f"{state}/{name}"))


def advance(generator: torch.Generator) -> None:
    """Move `generator` on, so that the next forks differ."""
    torch.rand(1, generator=generator, device=generator.device)


def portion(fraction: float, count: int) -> int:
    """`fraction` of `count` things, rounded down: 11 / 276 of 276 is 11, although the product is 10.999..."""
    return math.floor(fraction * count + 1e-9)


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """A permutation that depends on `random.random()` alone, the one method Python promises never to change."""
    key = random.Random(seed).random
    return [item for _, item in sorted(((key(), item) for item in items), key=lambda pair: pair[0])]
