"""The abstract task: a stream of batches with a loss and metrics.  Its random streams, splits, and words in reports."""

import abc
import hashlib
import importlib.resources
import itertools
import json
import math
import numbers
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from msgspec import Meta

from polyhead.config.components import Input, Output
from polyhead.spec import checked
from polyhead.spec.shapes import one_of

Item = TypeVar("Item")
Fraction = Annotated[float, Meta(gt=0, lt=1)]


# -------------------------------------------------------------------------------------------------------------- batches
Array = Any
"""A PyTorch tensor or a JAX array."""


@dataclass(frozen=True, repr=False)
class Batch:
    """One batch of a task; its `repr` has the shapes.

    For classification, `targets` and `scored` are (b 1).

    Attributes:
        inputs: (b t c), (b t), or images (b c height width).
        targets: (b t c) or (b t), at all positions.
        mask: (b s), True at real tokens; None if all are.
        scored: (b t), True at positions that enter loss and metrics.
        latents: The task's ground truth by name, (b ...).
        source: (b s) or (b s c), the inputs of an encoder, if the task has one.
        source_mask: (b s), True at real tokens of the source.
    """

    inputs: Array
    targets: Array
    mask: Array | None
    scored: Array
    latents: dict[str, Array]
    source: Array | None = None
    source_mask: Array | None = None

    def __repr__(self) -> str:
        arrays = {}
        for part in fields(self):
            if part.name != "latents":
                arrays[part.name] = getattr(self, part.name)
        for label, array in self.latents.items():
            arrays[f"latents[{label!r}]"] = array
        shapes = [f"{name} {tuple(array.shape)}" for name, array in arrays.items() if array is not None]
        return f"Batch({', '.join(shapes)})"

    @classmethod
    def cat(cls, batches: "Sequence[Batch]") -> "Batch":
        """Concatenate batches along their first dimension; a batch without a mask has real tokens only."""
        if not batches:
            raise ValueError("Batch: there must be at least one batch")
        sizes = [len(batch.scored) for batch in batches]
        parts: dict[str, Array] = {"latents": {}}
        for part in fields(cls):
            if part.name != "latents":
                parts[part.name] = _joined(part.name, [getattr(batch, part.name) for batch in batches], sizes)
        labels: dict[str, None] = {}  # each once, in the order of the batches
        for batch in batches:
            labels |= dict.fromkeys(batch.latents)
        for label in labels:
            arrays = [batch.latents.get(label) for batch in batches]
            parts["latents"][label] = _joined(f"latents[{label!r}]", arrays, sizes)
        return cls(**parts)

    def map(self, function: Callable[[Array], Array]) -> "Batch":
        """The batch with `function` applied to each array."""
        latents = {label: function(array) for label, array in self.latents.items()}
        parts = {}
        for part in fields(self):
            array = getattr(self, part.name)
            if part.name != "latents" and array is not None:
                parts[part.name] = function(array)
        return replace(self, **parts, latents=latents)

    def to(self, device: object, *, non_blocking: bool = False) -> "Batch":
        """The batch of PyTorch tensors on a device; accelerate and Lightning move batches by this method."""
        return self.map(lambda array: array.to(device, non_blocking=non_blocking))


def _joined(name: str, arrays: list[Array], sizes: list[int]) -> Array:
    """The arrays of one part, one of each batch, as one; None if no batch has that part."""
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if name in ("mask", "source_mask"):
        for i, array in enumerate(arrays):
            if array is None:
                arrays[i] = present[0].new_ones((sizes[i], *present[0].shape[1:]))
    elif len(present) < len(arrays):
        raise ValueError(f"Batch: {name} must be in all batches or in none, but is in some of {len(arrays)}")
    return torch.cat(arrays)


# ---------------------------------------------------------------------------------------------------------------- words
SPLIT_NAMES = {
    "train": "training data",
    "validation": "validation data",
    "iid": "fresh data",
    "compositional": "unseen combinations",
    "novel": "what was never seen in training",
}
"""Names of splits, for tasks that do not name them."""


@dataclass(frozen=True)
class Baseline:
    """A baseline score without training.

    `label` is its name; `does` completes "a predictor that ...".  `drawn`: figures show it as a line.
    """

    label: str
    does: str
    drawn: bool = False


@dataclass(frozen=True)
class Words:
    """The words of a task.

    Attributes:
        splits: Names of splits ("new shapes"), if the usual ones are not clear.
        metric: The name of the main metric and its meaning.
        baselines: Words for each baseline, by its name in `task.baselines`.
        part: What a task combines ("term"), for reports on the latent code.
    """

    splits: Mapping[str, str] = field(default_factory=dict)
    metric: tuple[str, str] | None = None
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    part: str = "part"


# ---------------------------------------------------------------------------------------------------------------- tasks
@dataclass(frozen=True)
class Task(checked.Task, abc.ABC):
    """A stream of data with a loss and metrics.  It does not depend on any network."""

    name: ClassVar[str]  # name of its seed streams, such as "fuzzy_logic"
    metric: ClassVar[str]  # the main metric among `metrics`
    items: ClassVar[str] = "sequences"  # the word for the items that it scores
    better: ClassVar[str] = "higher"  # or "lower": whether high or low scores of the main metric are good
    lazy: ClassVar[bool] = False  # whether loss and metrics also take LazyLogits (scores.py)
    autoregressive: ClassVar[bool] = False  # whether its inputs hold earlier targets: only for causal models
    words: ClassVar[Words] = Words()  # words that reports print about it

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(type(self).__name__, "better", self.better, ("higher", "lower"))

    # ------------------------------------------------------------------------------------------- what a model must know
    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Its splits, among `train`, `validation`, `iid`, `compositional`, `novel`."""

    @property
    @abc.abstractmethod
    def ends(self) -> tuple[Input, Output]:
        """The configurations of a transformer's inputs and outputs."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Tokens in a sequence."""

    @property
    def source(self) -> Input | None:
        """The configuration of an encoder's inputs; None for a task without an encoder."""
        return None

    @property
    def source_length(self) -> int:
        """The largest number of tokens an encoder reads."""
        return self.length

    @property
    def tail(self) -> int | None:
        """Only the last `tail` positions are ever scored; None if any position may be."""
        return None

    @property
    def pairs(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Named lists of (query, key) positions whose latent code reports show; by default the last token with
        itself."""
        return {"self": ((-1, -1),)}

    # ------------------------------------------------------------------------------------------------------------- data
    def count(self, split: str) -> int | None:
        """The number of sequences of a finite held-out split, all in its first batches; None: every batch is drawn."""
        return None

    def shared(self, split: str) -> bool:
        """Whether the sequences of a finite held-out split are the same for all seeds, so that all runs share their
        sampling error."""
        return False

    @abc.abstractmethod
    def sample(self, split: str, batch_size: int, generator: Any) -> Batch:
        """A batch on the generator's device."""

    def contrasts(self, split: str, batch_size: int, generator: Any) -> tuple[Batch, Batch]:
        """Two batches whose sequences have pairwise the same inputs and different rules.

        Raises:
            ValueError: For a task without such pairs.
        """
        raise ValueError(f"{type(self).__name__}: has no sequences that differ in their rule alone")

    # ----------------------------------------------------------------------------------------------------------- scores
    @abc.abstractmethod
    def loss(self, outputs: Array, batch: Batch) -> Array:
        """Mean loss over scored positions: a scalar; 0 if there are none, as in a part of an accumulated batch."""

    @abc.abstractmethod
    def metrics(self, outputs: Array, batch: Batch) -> dict[str, Array]:
        """Per-sequence scores (b,) by name: their mean over batches, weighted by `amounts`, is the reported figure.

        No name may be that of another score or column: "loss", "sequences", "step", "seconds", "lr", ..., and with
        "r2" also "r2_se"."""

    def amounts(self, batch: Batch) -> Array | None:
        """How much each sequence (b) counts in the means of `metrics`; None: all count the same."""
        return None

    def gain(self, score: float) -> float:
        """A score of the main metric for ranking: negated if lower is better."""
        return score if self.better == "higher" else -score

    def derived(self, scores: dict[str, float]) -> dict[str, float]:
        """Scores computed from those of a whole evaluation: `loss` and the means of the metrics.  By default none."""
        return {}

    # ------------------------------------------------------------------------------------------------------------ words
    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...] | None:
        """Names of the tokens of the first sample of `batch`, or of its source; None: reports show numbers."""
        return None

    def class_name(self, target: str, label: int) -> str:
        """The name of class `label` of `target`: "answer", or one of the labels of `analysis.targets`."""
        return str(label)

    def split_name(self, split: str) -> str:
        """The name of a split in tables and figures: that of `words`, or a usual one."""
        if split in self.words.splits:
            return self.words.splits[split]
        if split == "iid" and "compositional" in self.splits:
            return "known combinations"
        return SPLIT_NAMES.get(split, split.replace("_", " "))

    # ------------------------------------------------------------------------------------------------------------- runs
    def keep(self, folder: str | os.PathLike[str]) -> None:
        """At the start of a run, write to its folder which data these are, and what the model needs without them.

        Raises:
            ValueError: If the run in the folder was begun with other data.
        """

    def batch(self, split: str, batch_size: int, *, seed: int, step: int, device: Any = "cpu") -> Batch:
        """Batch number `step` of `split`: a pure function of (seed, split, step)."""
        return self.sample(split, batch_size, self.generator(split, seed=seed, step=step, device=device))

    def generator(self, split: str, *, seed: int, step: int, device: Any = "cpu") -> Any:
        """The random generator of batch number `step` of `split`.  Raises ValueError for a split that it lacks."""
        one_of(type(self).__name__, "split", split, self.splits)
        for noun, value in (("seed", seed), ("step", step)):  # 2.0 would be another stream than 2
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ValueError(f"{type(self).__name__}: {noun} must be an integer but is {value!r}")
        return torch.Generator(device).manual_seed(stream(int(seed), f"{self.name}/{split}", int(step)))


# -------------------------------------------------------------------------------------------------- checks of arguments
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


# ----------------------------------------------------------------------------------------------------------- randomness
def stream(seed: int, name: str, step: int = 0) -> int:
    """A seed of 63 bits for one consumer of randomness: `stream(0, "fuzzy_logic/compositional", 17)`.

    Streams are counter-based: a batch is a pure function of (seed, name, step).  So no generator state is stored, and
    streams of different names are independent.  PyTorch's generator on a CPU reads the lower 32 bits of a seed, so two
    batches may be equal by chance: among 50,000 with a probability of 25 %.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeded(seed: int, name: str) -> torch.Generator:
    """A generator for what is drawn once.  It is on the CPU, so that every device gets the same numbers."""
    return torch.Generator().manual_seed(stream(seed, name))


def fork(generator: torch.Generator, name: str) -> torch.Generator:
    """A generator on the same device for one use of randomness, called `name`.

    Forks under two names share draws only by chance, so splits get different data even from generators in the same
    state.
    `generator` is not changed; call `advance` after the last fork of a draw.
    """
    # Every generator's state is in CPU memory, so reading it never waits for an accelerator.
    state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()
    return torch.Generator(generator.device).manual_seed(stream(0, f"{state}/{name}"))


def advance(generator: torch.Generator) -> None:
    """Advance `generator`, so that the next forks differ."""
    # Under another default dtype it would take another number of random bits.
    torch.rand(1, generator=generator, device=generator.device, dtype=torch.float32)


def portion(fraction: float, count: int) -> int:
    """`fraction` of `count`, rounded down without float error: 11 / 276 of 276 is 11, not 10.999... rounded down."""
    return math.floor(fraction * count + 1e-9)


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """A random permutation from `random.random()` alone, the only method that Python guarantees to be stable."""
    generator = random.Random(seed)
    return sorted(items, key=lambda item: generator.random())


# ------------------------------------------------------------------------------------------------ held-out combinations
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
