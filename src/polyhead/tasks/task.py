"""Shared by tasks: named random streams within a draw, random splits, checks of splits and outputs, baseline scores."""

import hashlib
import importlib.resources
import itertools
import json
import math
import numbers
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar, runtime_checkable

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional as F

from polyhead.spec.shapes import one_of
from polyhead.tasks.base import Batch, Task, stream

Item = TypeVar("Item")
Fraction = Annotated[float, Meta(gt=0, lt=1)]


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
    """A metric over `count` sequences: its mean and the standard error of that mean."""

    mean: float
    standard_error: float
    count: int

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


def check_split(task: Task, split: str) -> str:
    """`split` if `task` has it; otherwise raise a ValueError that lists the valid splits, the nearest first."""
    return one_of(type(task).__name__, "split", split, task.splits)


def check_not_empty(task: Task, split: str) -> None:
    """Raise a ValueError if `split` has no sequences."""
    if task.count(split) == 0:
        raise ValueError(f"{type(task).__name__}: split {split!r} has no {task.items}")


def check_draw(task: Task, split: str, batch_size: int) -> None:
    """Raise a ValueError unless `task` can draw `batch_size` sequences of `split`."""
    check_split(task, split)
    if not isinstance(batch_size, numbers.Integral):
        raise ValueError(f"{type(task).__name__}: batch_size must be an integer but is {batch_size!r}")
    if batch_size < 1:
        raise ValueError(f"{type(task).__name__}: batch_size must be at least 1 but is {batch_size}")


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


def seeded(seed: int, name: str) -> torch.Generator:
    """A generator for what is drawn once.  It is on the CPU, so that every device gets the same numbers."""
    return torch.Generator().manual_seed(stream(seed, name))


def fork(generator: torch.Generator, name: str) -> torch.Generator:
    """A generator on the same device for one use of randomness, called `name`.

    Forks under two names share no draws, so splits get different data even from generators in the same state.
    `generator` is not changed; call `advance` after the last fork of a draw.
    """
    # Every generator's state is in CPU memory, so reading it never waits for an accelerator.
    state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()
    return torch.Generator(generator.device).manual_seed(stream(0, f"{state}/{name}"))


def advance(generator: torch.Generator) -> None:
    """Advance `generator`, so that the next forks differ."""
    # Under another default dtype it would take another number of random bits.
    torch.rand(1, generator=generator, device=generator.device, dtype=torch.float32)


def located(folder: str) -> str:
    """The absolute path of `folder`, for caches: a relative path means another folder in another working directory.

    Raises ValueError for a path in the home folder of a user who has none.
    """
    expanded = os.path.expanduser(folder)
    # Without a home folder `~` stays as it is, and a folder of that name would be created.
    if expanded == folder and (folder == "~" or folder.startswith("~" + os.sep)):
        raise ValueError(f"folder {folder}: this user has no home folder (set HOME)")
    return os.path.abspath(expanded)


def portion(fraction: float, count: int) -> int:
    """`fraction` of `count`, rounded down without float error: 11 / 276 of 276 is 11, not 10.999... rounded down."""
    return math.floor(fraction * count + 1e-9)


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """A random permutation from `random.random()` alone, the only method that Python guarantees to be stable."""
    generator = random.Random(seed)
    return sorted(items, key=lambda item: generator.random())


# ---------------------------------------------------------------------------------------------- held-out combinations
# How combinations are held out: at random, or as in the original code under JAX before 0.5 and since 0.5.
SPLITS = ("covered", "legacy", "partitionable")


def held_out_count(task: str, held_out: float, count: int, items: str) -> int:
    """How many of `count` combinations are held out.  Raises ValueError if that leaves a split empty."""
    num_held_out = portion(held_out, count)
    if not 0 < num_held_out < count:
        raise ValueError(f"{task}: held_out={held_out} of {count} {items} leaves one split empty")
    return num_held_out


def covering_order(
    rows: Sequence[tuple[int, ...]], num_held_out: int, parts: int, name: str, seed: int, tries: int
) -> list[tuple[int, ...]]:
    """The first of `tries` random orders in which the rows that are not held out have all `parts`; [] if none has.

    The first `num_held_out` rows of an order are held out.
    """
    for attempt in range(tries):
        order = shuffled(rows, stream(seed, name, attempt))
        if len(set(itertools.chain.from_iterable(order[num_held_out:]))) == parts:
            return order
    return []


def original_order(task: str, folder: str, rows: Sequence[Item], split: str, seed: int) -> list[Item]:
    """`rows` in the original code's order, from legacy.json in the package `folder`; the first rows are held out."""
    text = importlib.resources.files(folder).joinpath("legacy.json").read_text(encoding="utf-8")
    orders: dict[str, list[int]] = json.loads(text)[split]
    if str(seed) not in orders:
        raise ValueError(f"{task}: split={split!r} exists for split_seed {', '.join(orders)}, not for {seed}")
    return [rows[rank] for rank in orders[str(seed)]]
