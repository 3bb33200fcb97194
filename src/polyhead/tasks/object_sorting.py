"""Object sorting: sort objects by an order that must be learned from examples (Altabaa et al. 2024).

Objects are random vectors in an order that does not depend on the vectors.  A model reads `length` distinct objects and
writes their positions one at a time, smallest object first (an argsort).  For objects with the order 0 < 1 < 2 ...:

>>> sorting_order(torch.tensor([[7, 2, 40, 9]]))
tensor([[1, 0, 3, 2]])

The decoder reads a start token (the number `length`) and then the positions written so far: 4 1 0 3 here.
"""

import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from msgspec import Meta
from torch import Tensor
from torch.nn import functional as F

from polyhead.config import Logits, Tokens, Vectors
from polyhead.spec.checked import Amount, Count, Index
from polyhead.spec.shapes import shaped
from polyhead.tasks.base import Batch, Task, Words, advance, check_draw, fork, seeded
from polyhead.tasks.classification import ACCURACY, CHANCE
from polyhead.tasks.examples import Draw, distinct, picks, training_set, unseen
from polyhead.tasks.object_baselines import KNOWN_OBJECTS, ascending, mean_places, nearest
from polyhead.tasks.scores import Score, check_baselines, check_logits, right_tokens

ATTRIBUTES = ((4, 4), (12, 8))  # count and width of values: the first decides, the second breaks ties
COUNT, WIDTH = 48, 12  # of objects, and of their vectors


@dataclass(frozen=True)
class ObjectSorting(Task):
    """Argsort of objects by a learned order, from a training set of a given size.

        train              `examples` sequences, drawn once from `split_seed`; a batch samples them with replacement
        validation, iid    fresh sequences, none of them in the training set
        novel              fresh sequences, with noise N(0, noise^2) added to each vector

    Objects are all concatenations of one of 4 vectors `N(0, I_4)` and one of 12 vectors `N(0, I_8)`, ordered by the
    first and then by the second.  The vectors also depend on `split_seed`.

    Latents: `objects` (b t), the place of each object in the order.

    >>> batch = ObjectSorting(length=4).batch("iid", 2, seed=0, step=0)
    >>> batch.source.shape, batch.inputs.shape, batch.targets.shape
    (torch.Size([2, 4, 12]), torch.Size([2, 4]), torch.Size([2, 4]))

    Attributes:
        length: Objects of a sequence.
        examples: Training sequences.
        noise: Standard deviation of the noise of the split `novel`.
        split_seed: Seed of the vectors and of the training sequences.
    """

    length: Annotated[int, Meta(ge=2, le=COUNT)] = 10
    examples: Count = 1000
    noise: Amount = 0.1
    split_seed: Index = 0

    name: ClassVar[str] = "object_sorting"
    splits: ClassVar[tuple[str, ...]] = ("train", "validation", "iid", "novel")
    metric: ClassVar[str] = "accuracy"
    autoregressive: ClassVar[bool] = True
    words: ClassVar[Words] = Words(
        splits={"novel": "disturbed objects"},
        metric=ACCURACY,
        baselines={"chance": CHANCE, "known_objects": KNOWN_OBJECTS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        half = math.perm(COUNT, self.length) // 2
        if self.examples > half:
            raise ValueError(
                f"ObjectSorting: examples must be at most {half} (half of all sequences) but is {self.examples}"
            )

    @property
    def ends(self) -> tuple[Tokens, Logits]:
        return Tokens(self.length + 1), Logits(self.length)

    @property
    def source(self) -> Vectors:
        return Vectors(WIDTH)

    def vectors(self) -> Float[Tensor, "n c"]:
        """The objects (n c), smallest first."""
        return _vectors(self.split_seed, torch.device("cpu")).clone()

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: source (b t c), inputs and targets (b t)."""
        check_draw(self, split, batch_size)
        draws = fork(generator, f"{self.name}/{split}")
        advance(generator)
        device = draws.device
        pool = _pool(self, device)
        if split == "train":
            objects = pool[picks(len(pool), batch_size, draws)]
        else:
            objects = unseen(_drawer(self, draws), torch.arange(batch_size, device=device), pool)
        source = _vectors(self.split_seed, device)[objects]  # (b t c)
        if split == "novel":
            noise = torch.randn(source.shape, generator=draws, device=device, dtype=torch.float32)
            source = source + self.noise * noise
        targets = sorting_order(objects)
        start = torch.full((batch_size, 1), self.length, device=device)
        scored = torch.ones(targets.shape, dtype=torch.bool, device=device)
        return Batch(torch.cat((start, targets[:, :-1]), 1), targets, None, scored, {"objects": objects}, source)

    @shaped
    def loss(self, outputs: Float[Tensor, "b t c"], batch: Batch) -> Float[Tensor, ""]:
        """Mean cross-entropy over all positions."""
        logits = check_logits(self, outputs, batch, self.length)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    @shaped
    def metrics(self, outputs: Float[Tensor, "b t c"], batch: Batch) -> dict[str, Float[Tensor, "b"]]:
        """For each sequence (b): `accuracy`, 1 if the whole order is right, and `element_accuracy`.

        The decoder sees the true earlier positions.  If the whole order is right, greedy decoding gives it as well.
        """
        logits = check_logits(self, outputs, batch, self.length)
        return right_tokens(logits, batch.targets, "element_accuracy")

    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...]:
        """For objects, index and rank in the order; for the output, the positions; all counted from 1."""
        if source:
            return tuple(f"{i + 1}: #{rank}" for i, rank in enumerate(batch.latents["objects"][0].tolist()))
        return ("start", *(str(rank + 1) for rank in batch.inputs[0, 1:].tolist()))

    def class_name(self, target: str, label: int) -> str:
        return str(label + 1)

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """Share of whole orders right: exact for guessing, and of learners without relations (object_baselines.py)."""
        check_baselines(self, split, sequences)
        batch = self.batch(split, sequences, seed=seed, step=0)
        means = mean_places(_pool(self, torch.device("cpu")), COUNT)
        objects = nearest(batch.source, self.vectors())  # type: ignore[arg-type]
        in_order = objects.take_along_dim(batch.targets, dim=1)  # (b t)
        return {
            "chance": Score(1 / math.factorial(self.length)),
            "known_objects": Score.of(ascending(means[in_order])),
        }


@shaped
def sorting_order(objects: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The positions of the objects of each sequence, smallest object first."""
    return objects.argsort(dim=1)


@functools.lru_cache(maxsize=16)
def _vectors(seed: int, device: torch.device) -> Tensor:
    """The objects (n c), smallest first."""
    generator = seeded(seed, "object_sorting/product/vectors")
    first = torch.randn(ATTRIBUTES[0], generator=generator, dtype=torch.float32, device="cpu")
    second = torch.randn(ATTRIBUTES[1], generator=generator, dtype=torch.float32, device="cpu")
    # All pairs of a row of `first` and a row of `second` (n 2).
    rows = torch.cartesian_prod(torch.arange(len(first), device="cpu"), torch.arange(len(second), device="cpu"))
    return torch.cat((first[rows[:, 0]], second[rows[:, 1]]), dim=1).to(device)


@functools.lru_cache(maxsize=16)
def _pool(task: ObjectSorting, device: torch.device) -> Tensor:
    """The training set (n t): distinct sequences of objects."""
    generator = seeded(task.split_seed, f"{task.name}/product/examples")
    return training_set(_drawer(task, generator), task.examples).to(device)


def _drawer(task: ObjectSorting, generator: torch.Generator) -> Draw:
    """The function that draws sequences of distinct objects; they have no kinds."""
    return lambda kinds: distinct(len(kinds), task.length, COUNT, generator)
