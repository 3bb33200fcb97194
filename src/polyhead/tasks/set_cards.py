"""SET: do three cards make a set? (Altabaa et al. 2024)

There are 81 cards.  A card has four attributes (number, colour, shading, shape) with three values each.  Three cards
are a set if every attribute is the same on all three or different on all three:

>>> is_set(torch.tensor([[[0, 1, 2, 0], [0, 2, 0, 1], [0, 0, 1, 2]], [[0, 1, 2, 0], [0, 2, 0, 1], [0, 0, 1, 1]]]))
tensor([ True, False])

Each pair of cards completes to exactly one set: 1080 of the 85320 triples are sets.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Int
from msgspec import Meta
from torch import Tensor
from torch.nn import functional as F

from polyhead.config import Classes, Vectors
from polyhead.spec.checked import Index
from polyhead.spec.shapes import shaped
from polyhead.tasks.base import Batch, Words, advance, check_draw, check_split, fork, seeded
from polyhead.tasks.classification import ACCURACY, ANSWERS, CHANCE, Classification, batch_of, exact
from polyhead.tasks.examples import picks
from polyhead.tasks.object_baselines import KNOWN_PAIRS, card_pairs
from polyhead.tasks.scores import Score

CARDS = tuple(itertools.product(range(3), repeat=4))
SETS, HELD = 1080, 540  # all sets, and the half that training never contains
VALIDATION = 162  # held-out sets for validation: 15 % of all sets, as in pairwise order
ORDERS = tuple(itertools.permutations(range(3)))


@dataclass(frozen=True)
class SetCards(Classification):
    """Classification of three cards, half of them sets, from a training set of a given size.

        train            `examples` triples, every other one a set, drawn once from `split_seed`
        validation       15 % of the sets, and equally many other triples
        compositional    35 % of the sets, and equally many other triples: unseen triples of cards seen in training

    A card is four one-hot vectors of three numbers, one for each attribute.  Every batch shuffles the three cards.

    Latents: `cards` (b 3 4), the values of the attributes; `agree` (b 4): whether an attribute fits a set.

    >>> SetCards().batch("train", 8, seed=0, step=0).inputs.shape
    torch.Size([8, 3, 12])

    Attributes:
        examples: Training triples.
        split_seed: Seed of the training triples and of the division of triples.
    """

    examples: Annotated[int, Meta(ge=2, le=2 * (SETS - HELD))] = 1080  # at most half of the sets, and as many others
    split_seed: Index = 0

    name: ClassVar[str] = "set_cards"
    splits: ClassVar[tuple[str, ...]] = ("train", "validation", "compositional")
    ends: ClassVar[tuple[Vectors, Classes]] = (Vectors(12), Classes(2))
    length: ClassVar[int] = 3
    items: ClassVar[str] = "triples"
    words: ClassVar[Words] = Words(
        splits={"compositional": "unseen triples"},
        metric=ACCURACY,
        baselines={"chance": CHANCE, "known_pairs": KNOWN_PAIRS},
    )

    def triples(self, split: str) -> Int[Tensor, "n 3"]:
        """The triples (n 3) of `split`, as ascending card numbers; every second triple is a set."""
        sets, others = _shuffled(self.split_seed)
        if check_split(self, split) == "train":
            half = (self.examples + 1) // 2
            return torch.stack((others[:half], sets[:half]), 1).flatten(0, 1)[: self.examples]
        # The held-out half of the sets: first those of validation, then those of the test.
        first, last = SETS - HELD, SETS - HELD + VALIDATION
        if split == "compositional":
            first, last = last, SETS
        return torch.stack((others[first:last], sets[first:last]), 1).flatten(0, 1)

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: inputs (b 3 12), targets (b 1)."""
        check_draw(self, split, batch_size)
        draws = fork(generator, f"{self.name}/{split}")
        advance(generator)
        cards = torch.tensor(CARDS, device="cpu")[self.triples(split)].to(draws.device)  # (n 3 4)
        rows = picks(len(cards), batch_size, draws)
        order = torch.tensor(ORDERS, device=draws.device)[picks(len(ORDERS), batch_size, draws)]
        drawn = cards[rows].take_along_dim(order[:, :, None], dim=1)  # (b 3 4)
        inputs = F.one_hot(drawn, 3).flatten(2).float()
        return batch_of(inputs, is_set(drawn), {"cards": drawn, "agree": _agree(drawn)})

    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...]:
        """The four values of each card."""
        return tuple("".join(map(str, card)) for card in batch.latents["cards"][0].tolist())

    def class_name(self, target: str, label: int) -> str:
        return ANSWERS[label]

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """Scores of guessing and of a learner without the rule (object_baselines.py), exact: over all triples."""
        training = self.triples("train")
        triples = self.triples(split)
        answers = card_pairs(training, _labels(training), triples)
        scores = super().baselines(split, sequences=sequences)
        scores["known_pairs"] = exact(1 - (answers - _labels(triples)).abs())
        return scores


@shaped
def is_set(cards: Int[Tensor, "b 3 c"]) -> Bool[Tensor, "b"]:
    """Whether three cards, given by their attributes, are a set."""
    return _agree(cards).all(dim=-1)


def _agree(cards: Tensor) -> Tensor:
    """Whether an attribute is equal on all three cards or differs on all (b c): its sum is then 0 modulo 3."""
    return cards.sum(dim=1) % 3 == 0


def _labels(triples: Tensor) -> Tensor:
    """1 if a triple of card numbers is a set (n)."""
    return is_set(torch.tensor(CARDS, device="cpu")[triples]).double()


@functools.lru_cache(maxsize=16)
def _shuffled(seed: int) -> tuple[Tensor, Tensor]:
    """All sets (1080 3) and equally many other triples, as card numbers in random order."""
    generator = seeded(seed, "set_cards/split")
    triples = torch.combinations(torch.arange(len(CARDS), device="cpu"), 3)  # (n 3)
    triples = triples[torch.randperm(len(triples), generator=generator, device="cpu")]
    right = is_set(torch.tensor(CARDS, device="cpu")[triples])
    return triples[right], triples[~right][:SETS]
