"""Floors of tasks on objects: what a learner can reach to which an object is a name, and that knows no relation.

Pairwise order.  Of n objects, `known_pairs` knows the training pairs and their reverses, and guesses elsewhere:
0.5 + 0.5 r, where r is the share of the pairs whose reverse is in training; about a half of "ordered" ones, none of
"unordered" ones.  `known_objects` knows of every object only how often it came first, and compares these shares:

    share_i = (first_i + 1) / (pairs_i + 2)            class 1 where share_i > share_j, a guess where they are equal

An object at place k of n comes before (n - 1 - k) / (n - 1) of the others, so the shares stand in the order itself, up
to which pairs training has.  No pair is compared: a score that is not above it may be one number per object.

Sorting.  `known_objects` gives each object its mean place in the training sequences that have it, the middle where
none has, and sorts by that.  Before the object at place k of N stand (L - 1) k / (N - 1) others of its sequence, on
average, so that with many sequences the order is right.  Of m objects that tie any order is as likely: 1 / m!.  A
disturbed vector is taken for the nearest object.

SET.  Two cards have one third, so that no two sets share a pair.  `known_pairs` knows the names of cards and counts k,
how many of the three pairs of a triple it has met in training sets.  It answers as most training triples with this k
are, their own pairs left out, and guesses where none is or both classes have as many.  With s training sets 3 s of the
3240 pairs are taken: a share p = s / 1080.  An unseen set has k = 0, another triple in about (1 - p)^3 of the cases, so
that k = 0 says set: 0.5 + 0.5 (1 - (1 - p)^3), which is 0.94 for all 540 sets.  Values alone say nothing: each is as
common in sets as elsewhere.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.config.words import Floor
from polyhead.spec.shapes import shaped

KNOWN_PAIRS = Floor(
    "Known pairs",
    "knows no relation, only the pairs of objects that it met in training",
    by="the pairs of objects it has met",
    drawn=True,
)
KNOWN_OBJECTS = Floor(
    "Known objects",
    "knows no relation, only the mean place of each object in training",
    by="one number for each object, where it stood in training",
    drawn=True,
)
BY_OBJECT = (
    "Known objects",
    "One number for each object, its mean place in training; objects are put into the order of these numbers, so that "
    "none is compared with another.",
)


@shaped
def ordered_pairs(met: Int[Tensor, "n 2"], asked: Int[Tensor, "b 2"]) -> Float[Tensor, "b"]:
    """`known_pairs` of an order: 1 where the pair or its reverse was met, 0.5 where it is guessed; the score."""
    numbers = _number(torch.cat((met, met.flip(1))))
    return 0.5 + 0.5 * torch.isin(_number(asked), numbers).double()


@shaped
def first_shares(met: Int[Tensor, "n 2"], asked: Int[Tensor, "b 2"], objects: int) -> Float[Tensor, "b"]:
    """`known_objects` of an order: 1 where the shares put a pair right, 0.5 where they are equal, 0 elsewhere.

    Objects are named by their places, so that the smaller name comes first.
    """
    smaller, larger = met.min(dim=1).values, met.max(dim=1).values
    first, second = (torch.bincount(each, minlength=objects).double() for each in (smaller, larger))
    share = (first + 1) / (first + second + 2)
    says = (share[asked[:, 0]] - share[asked[:, 1]]).round(decimals=9).sign()
    is_so = (asked[:, 1] - asked[:, 0]).sign().double()
    return 0.5 + 0.5 * says * is_so


@shaped
def mean_places(met: Int[Tensor, "n t"], objects: int) -> Float[Tensor, "o"]:
    """`known_objects` of sorting: the mean place (from 0) of each of `objects` in the sequences that have it."""
    length = met.shape[1]
    places = met.argsort(dim=1).argsort(dim=1).double()  # objects are named by their places in the order
    total = torch.zeros(objects, dtype=torch.double).index_add(0, met.flatten(), places.flatten())
    count = torch.bincount(met.flatten(), minlength=objects)
    return torch.where(count > 0, total / count.clamp(min=1), (length - 1) / 2)


@shaped
def ascending(values: Float[Tensor, "b t"]) -> Float[Tensor, "b"]:
    """How likely objects in their true order are put into it by sorting their `values`; ties as they come."""
    values = values.round(decimals=9)
    alike = (values[:, :, None] == values[:, None]).sum(dim=2).double()
    ties = torch.exp(-(torch.lgamma(alike + 1) / alike).sum(dim=1))  # a group of m stands m times here
    return (values.diff(dim=1) >= 0).all(dim=1) * ties


@shaped
def nearest(vectors: Float[Tensor, "b t c"], known: Float[Tensor, "n c"]) -> Int[Tensor, "b t"]:
    """Which of the `known` vectors is nearest."""
    return torch.cdist(vectors.double(), known.double()).argmin(dim=-1)


@shaped
def card_pairs(met: Int[Tensor, "n 3"], sets: Float[Tensor, "n"], asked: Int[Tensor, "b 3"]) -> Float[Tensor, "b"]:
    """`known_pairs` of SET: 1 where it says that a triple (cards by number) is a set, 0.5 where it guesses.

    `sets`: 1 for the training triples that are one.  A triple that was met is known.
    """
    taken, own = _number(_pairs(met[sets == 1]).flatten(0, 1)), sets.long()
    counts = (_number(_pairs(met))[..., None] == taken).sum(dim=-1) - own[:, None]
    votes = torch.zeros(4).index_add(0, (counts > 0).sum(dim=1), 2 * sets.float() - 1).sign()
    k = torch.isin(_number(_pairs(asked)), taken).sum(dim=1)
    memory = (asked.sort(dim=1).values[:, None] == met.sort(dim=1).values).all(dim=-1)
    known = memory.double() @ (2 * sets.double() - 1)
    return 0.5 + 0.5 * torch.where(memory.any(dim=1), known.sign(), votes[k].double())


def _pairs(triples: Tensor) -> Tensor:
    """(n 3 2), the lesser card first."""
    return triples.sort(dim=1).values[:, torch.combinations(torch.arange(3))]


def _number(pairs: Tensor) -> Tensor:
    """A number for each pair (... 2)."""
    return pairs[..., 0] * 2**20 + pairs[..., 1]
