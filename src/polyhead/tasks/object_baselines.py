"""Baselines of tasks on objects: scores of learners that treat an object as a name and know no relation.

Pairwise order, n objects.  `known_pairs` knows the training pairs and their reverses, and guesses all other pairs.  It
scores 0.5 + 0.5 r, where r is the share of pairs whose reverse is in training: about a half for split "ordered", none
for "unordered".  `known_objects` knows how often each object came first, and compares these shares:

    share_i = (first_i + 1) / (pairs_i + 2)            class 1 if share_i > share_j, a guess if they are equal

An object at place k of n comes before (n - 1 - k) / (n - 1) of the others.  So the shares follow the order, except for
the choice of training pairs.  A score that is not above this baseline needs only one number per object, and no
comparison of pairs.

Sorting.  `known_objects` sorts by the mean place of each object in the training sequences that contain it, or the
middle place if none does.  In sequences of L out of N objects, (L - 1) k / (N - 1) others stand on average before the
object at place k, so the order is right with many sequences.  All orders of m tied objects are equally likely: 1 / m!.
A noisy vector counts as the nearest object.

SET.  Each pair of cards completes to exactly one set, so two sets never share a pair.  `known_pairs` knows the names of
cards.  It counts k, the number of the three pairs of a triple that occur in training sets.  Its answer is the majority
class of the training triples with this k, without counting a triple's own pairs; it guesses if there are none or the
classes tie.  The s training sets contain 3 s of the 3240 pairs: a share p = s / 1080.  An unseen set has k = 0, another
triple has k = 0 with probability of about (1 - p)^3.  So k = 0 means set, and the score is
0.5 + 0.5 (1 - (1 - p)^3): 0.94 with all 540 sets.  Single values carry no information: each is as common in sets as
elsewhere.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.config.words import Baseline
from polyhead.spec.shapes import shaped

KNOWN_PAIRS = Baseline(
    "Known pairs",
    "knows no relation, only the pairs of objects that it met in training",
    by="the pairs of objects it has met",
    drawn=True,
    short="pairs",
)
KNOWN_OBJECTS = Baseline(
    "Known objects",
    "knows no relation, only the mean place of each object in training",
    by="one number for each object, where it stood in training",
    drawn=True,
    short="objects",
)
BY_OBJECT = (
    "Known objects",
    "One number for each object, its mean place in training; objects are put into the order of these numbers, so that "
    "none is compared with another.",
)


@shaped
def ordered_pairs(met: Int[Tensor, "n 2"], asked: Int[Tensor, "b 2"]) -> Float[Tensor, "b"]:
    """Score of `known_pairs` on an order: 1 if training has the pair or its reverse, else 0.5 for a guess."""
    numbers = _number(torch.cat((met, met.flip(1))))
    return 0.5 + 0.5 * torch.isin(_number(asked), numbers).double()


@shaped
def first_shares(met: Int[Tensor, "n 2"], asked: Int[Tensor, "b 2"], objects: int) -> Float[Tensor, "b"]:
    """Score of `known_objects` on an order: 1 if the shares order a pair correctly, 0.5 if they are equal, else 0.

    An object's name is its place in the order, so the smaller name comes first.
    """
    smaller, larger = met.min(dim=1).values, met.max(dim=1).values
    first, second = (torch.bincount(each, minlength=objects).double() for each in (smaller, larger))
    share = (first + 1) / (first + second + 2)
    says = (share[asked[:, 0]] - share[asked[:, 1]]).round(decimals=9).sign()
    is_so = (asked[:, 1] - asked[:, 0]).sign().double()
    return 0.5 + 0.5 * says * is_so


@shaped
def mean_places(met: Int[Tensor, "n t"], objects: int) -> Float[Tensor, "o"]:
    """`known_objects` for sorting: the mean place (from 0) of each of `objects` in the sequences that contain it."""
    length = met.shape[1]
    places = met.argsort(dim=1).argsort(dim=1).double()  # an object's name is its place in the order
    total = torch.zeros(objects, dtype=torch.double).index_add(0, met.flatten(), places.flatten())
    count = torch.bincount(met.flatten(), minlength=objects)
    return torch.where(count > 0, total / count.clamp(min=1), (length - 1) / 2)


@shaped
def ascending(values: Float[Tensor, "b t"]) -> Float[Tensor, "b"]:
    """The probability that sorting by `values` gives the true order, with ties in random order."""
    values = values.round(decimals=9)
    alike = (values[:, :, None] == values[:, None]).sum(dim=2).double()
    ties = torch.exp(-(torch.lgamma(alike + 1) / alike).sum(dim=1))  # m tied objects enter m times, each with 1 / m
    return (values.diff(dim=1) >= 0).all(dim=1) * ties


@shaped
def nearest(vectors: Float[Tensor, "b t c"], known: Float[Tensor, "n c"]) -> Int[Tensor, "b t"]:
    """The index of the nearest of the `known` vectors."""
    return torch.cdist(vectors.double(), known.double()).argmin(dim=-1)


@shaped
def card_pairs(met: Int[Tensor, "n 3"], sets: Float[Tensor, "n"], asked: Int[Tensor, "b 3"]) -> Float[Tensor, "b"]:
    """Answers of `known_pairs` on SET: 1 if it calls a triple (cards by number) a set, 0.5 if it guesses, else 0.

    `sets`: 1 for training triples that are sets.  A training triple is answered from memory.
    """
    taken, own = _number(_pairs(met[sets == 1]).flatten(0, 1)), sets.long()
    counts = (_number(_pairs(met))[..., None] == taken).sum(dim=-1) - own[:, None]
    votes = torch.zeros(4, dtype=torch.double).index_add(0, (counts > 0).sum(dim=1), 2 * sets.double() - 1).sign()
    k = torch.isin(_number(_pairs(asked)), taken).sum(dim=1)
    memory = (asked.sort(dim=1).values[:, None] == met.sort(dim=1).values).all(dim=-1)
    known = memory.double() @ (2 * sets.double() - 1)
    return 0.5 + 0.5 * torch.where(memory.any(dim=1), known.sign(), votes[k])


def _pairs(triples: Tensor) -> Tensor:
    """The pairs (n 3 2) of each triple, the smaller card first."""
    return triples.sort(dim=1).values[:, torch.combinations(torch.arange(3))]


def _number(pairs: Tensor) -> Tensor:
    """A unique number for each pair (... 2)."""
    return pairs[..., 0] * 2**20 + pairs[..., 1]
