"""Pairwise order: which of two objects comes first, in an order learned from examples (Altabaa et al. 2024).

There are `objects` random vectors N(0, I); the k-th has place k in the order.  A pair (i, j) has class 1 if i < j.
Test pairs never occur in training: the order must be inferred from transitivity and antisymmetry.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from polyhead.config import Classes, Vectors
from polyhead.spec.checked import Count, Index
from polyhead.tasks.base import Batch, Words, advance, check_draw, check_split, fork, portion, seeded
from polyhead.tasks.classification import ACCURACY, ANSWERS, CHANCE, Classification, batch_of, exact
from polyhead.tasks.examples import picks
from polyhead.tasks.object_baselines import KNOWN_OBJECTS, KNOWN_PAIRS, first_shares, ordered_pairs
from polyhead.tasks.scores import Score

SHARES = (0.5, 0.65)  # where the pairs are cut: 50 % training, 15 % validation, 35 % test


@dataclass(frozen=True)
class PairwiseOrder(Classification):
    """Classification of pairs of objects by a learned order.

        train, validation    50 % and 15 % of all pairs
        compositional        the other 35 %: unseen pairs of objects that occur in training, unless `examples` are few

    (i, j) and (j, i) are assigned independently, as in the paper: training has the reverse of half of the test pairs.

    Latents: `objects` (b 2), the place of each object in the order.

    >>> [len(PairwiseOrder().pairs_of(split)) for split in PairwiseOrder.splits]
    [2016, 604, 1412]

    Attributes:
        objects: How many objects there are.
        dim: Width of the vector of an object.
        examples: How many training pairs are used; None: all.
        split_seed: Seed of the objects and of the division of pairs.
    """

    objects: Annotated[int, Meta(ge=4, le=4096)] = 64
    dim: Count = 8
    examples: Count | None = None
    split_seed: Index = 0

    name: ClassVar[str] = "pairwise_order"
    splits: ClassVar[tuple[str, ...]] = ("train", "validation", "compositional")
    length: ClassVar[int] = 2
    items: ClassVar[str] = "pairs"
    words: ClassVar[Words] = Words(
        splits={"compositional": "unseen pairs"},
        metric=ACCURACY,
        baselines={"chance": CHANCE, "known_pairs": KNOWN_PAIRS, "known_objects": KNOWN_OBJECTS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(_pairs(self.objects, self.split_seed)["train"])
        if self.examples is not None and self.examples > count:
            raise ValueError(f"PairwiseOrder: examples must be at most {count} (pairs) but is {self.examples}")

    @property
    def ends(self) -> tuple[Vectors, Classes]:
        return Vectors(self.dim), Classes(2)

    def pairs_of(self, split: str) -> Tensor:
        """The pairs (n 2) of a split."""
        pairs = _pairs(self.objects, self.split_seed)[check_split(self, split)]
        if split == "train":
            pairs = pairs[: self.examples]
        return pairs.clone()

    def vectors(self) -> Float[Tensor, "n c"]:
        """The objects (n c) in their order."""
        return _vectors(self.objects, self.dim, self.split_seed, torch.device("cpu")).clone()

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: inputs (b 2 c), targets (b 1)."""
        check_draw(self, split, batch_size)
        draws = fork(generator, f"{self.name}/{split}")
        advance(generator)
        pairs = self.pairs_of(split).to(draws.device)
        objects = pairs[picks(len(pairs), batch_size, draws)]
        inputs = _vectors(self.objects, self.dim, self.split_seed, draws.device)[objects]
        return batch_of(inputs, objects[:, 0] < objects[:, 1], {"objects": objects})

    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...]:
        """Index and rank in the order."""
        return tuple(f"{i + 1}: #{rank}" for i, rank in enumerate(batch.latents["objects"][0].tolist()))

    def class_name(self, target: str, label: int) -> str:
        return ANSWERS[label]

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """Scores of guessing and of learners without relations (object_baselines.py), exact: over all pairs."""
        training = self.pairs_of("train")
        pairs = self.pairs_of(split)
        scores = super().baselines(split, sequences=sequences)
        scores["known_pairs"] = exact(ordered_pairs(training, pairs))
        scores["known_objects"] = exact(first_shares(training, pairs, self.objects))
        return scores


@functools.lru_cache(maxsize=16)
def _pairs(objects: int, seed: int) -> dict[str, Tensor]:
    """All pairs of distinct objects, by split."""
    generator = seeded(seed, f"pairwise_order/{objects}/ordered")
    pairs = torch.combinations(torch.arange(objects, device="cpu"))  # (n 2), the smaller one first
    pairs = torch.cat((pairs, pairs.flip(1)))  # both orders
    pairs = pairs[torch.randperm(len(pairs), generator=generator, device="cpu")]
    cuts = [portion(share, len(pairs)) for share in SHARES]
    return dict(zip(PairwiseOrder.splits, pairs.tensor_split(cuts), strict=True))


@functools.lru_cache(maxsize=16)
def _vectors(objects: int, dim: int, seed: int, device: torch.device) -> Tensor:
    """The objects (n c) in their order."""
    generator = seeded(seed, f"pairwise_order/{objects}/{dim}/vectors")
    return torch.randn(objects, dim, generator=generator, dtype=torch.float32, device="cpu").to(device)
