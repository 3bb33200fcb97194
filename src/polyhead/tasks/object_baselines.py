"""Baselines of tasks on objects: scores of learners that treat an object as a name and know no relation.

Pairwise order.  `known_pairs` knows the training pairs and their reverses, and guesses all other pairs.
`known_objects` knows how often each object came first, and compares these shares:

    share_i = (first_i + 1) / (pairs_i + 2)            class 1 if share_i > share_j, a guess if they are equal

A score that is not above it needs only one number per object, and no comparison of pairs.

Sorting.  `known_objects` sorts by the mean place of each object in the training sequences that contain it, or the
middle place if none does.  All orders of m tied objects are equally likely: 1 / m!.  A noisy vector counts as the
nearest object.

SET.  Each pair of cards completes to exactly one set, so two sets never share a pair.  `known_pairs` counts k, the
number of the three pairs of a triple that occur in training sets.  Its answer is the majority class of the training
triples with this k, without counting a triple's own pairs; it guesses if there are none or the classes tie.  A share
p of all pairs is in training sets: it scores 0.5 + 0.5 (1 - (1 - p)^3).

Relational games.  `known_pairs` remembers the classes of the training images in which a pair of objects occurred, in
any cells.  n_c(a, b) counts how often a and b occur together in a training image of class c; the evidence of all pairs
of an image is added as if they were independent:

    evidence = Σ_{pairs of cells} log (n_1(a, b) + 1) / (n_0(a, b) + 1)        class 1 where it is above 0, 0 below

Without evidence it answers the majority class of the training images that have no evidence from the other training
images (leave one out); it guesses on a tie.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.spec.shapes import shaped
from polyhead.tasks.base import Baseline

KNOWN_PAIRS = Baseline("Known pairs", "knows no relation, only the pairs of objects of training", drawn=True)
KNOWN_OBJECTS = Baseline(
    "Known objects", "knows no relation, only the mean place of each object in training", drawn=True
)


@shaped
def ordered_pairs(training: Int[Tensor, "n 2"], pairs: Int[Tensor, "b 2"]) -> Float[Tensor, "b"]:
    """Score of `known_pairs` on an order: 1 if training has the pair or its reverse, else 0.5 for a guess."""
    numbers = _number(torch.cat((training, training.flip(1))))  # (2n)
    return 0.5 + 0.5 * torch.isin(_number(pairs), numbers).double()


@shaped
def first_shares(training: Int[Tensor, "n 2"], pairs: Int[Tensor, "b 2"], objects: int) -> Float[Tensor, "b"]:
    """Score of `known_objects` on an order: 1 if the shares order a pair correctly, 0.5 if they are equal, else 0.

    An object's name is its place in the order, so the smaller name comes first.
    """
    first = torch.bincount(training.min(dim=1).values, minlength=objects).double()
    second = torch.bincount(training.max(dim=1).values, minlength=objects).double()
    share = (first + 1) / (first + second + 2)  # (objects)
    guess = (share[pairs[:, 0]] - share[pairs[:, 1]]).round(decimals=9).sign()
    truth = (pairs[:, 1] - pairs[:, 0]).sign().double()
    return 0.5 + 0.5 * guess * truth


@shaped
def mean_places(training: Int[Tensor, "n t"], objects: int) -> Float[Tensor, "o"]:
    """`known_objects` for sorting: the mean place (from 0) of each of `objects` in the sequences that contain it."""
    length = training.shape[1]
    ranks = training.argsort(dim=1).argsort(dim=1).double()  # an object's name is its place in the order
    total = torch.zeros(objects, dtype=torch.double).index_add(0, training.flatten(), ranks.flatten())
    count = torch.bincount(training.flatten(), minlength=objects)
    return torch.where(count > 0, total / count.clamp(min=1), (length - 1) / 2)


@shaped
def ascending(values: Float[Tensor, "b t"]) -> Float[Tensor, "b"]:
    """The probability that sorting by `values` gives the true order, with ties in random order."""
    values = values.round(decimals=9)
    alike = (values[:, :, None] == values[:, None]).sum(dim=2).double()  # (b t): objects of the same value
    ties = torch.exp(-(torch.lgamma(alike + 1) / alike).sum(dim=1))  # m tied objects enter m times, each with 1 / m
    return (values.diff(dim=1) >= 0).all(dim=1) * ties


@shaped
def nearest(vectors: Float[Tensor, "b t c"], objects: Float[Tensor, "n c"]) -> Int[Tensor, "b t"]:
    """The index of the object that is nearest to each vector."""
    return torch.cdist(vectors.double(), objects.double()).argmin(dim=-1)


@shaped
def card_pairs(
    training: Int[Tensor, "n 3"], labels: Float[Tensor, "n"], triples: Int[Tensor, "b 3"]
) -> Float[Tensor, "b"]:
    """Answers of `known_pairs` on SET: 1 if it calls a triple (cards by number) a set, 0.5 if it guesses, else 0.

    `labels`: 1 for training triples that are sets.  A training triple is answered from memory.
    """
    signs = 2 * labels.double() - 1
    pairs_of_sets = _number(_pairs(training[labels == 1]).flatten(0, 1))
    # How often each pair of a training triple occurs in the sets, without the triple's own occurrence.
    counts = (_number(_pairs(training))[..., None] == pairs_of_sets).sum(dim=-1) - labels.long()[:, None]
    k_of_training = (counts > 0).sum(dim=1)  # (n): pairs that occur in sets
    votes = torch.zeros(4, dtype=torch.double).index_add(0, k_of_training, signs).sign()
    k = torch.isin(_number(_pairs(triples)), pairs_of_sets).sum(dim=1)  # (b)
    # Cards in any order are the same triple.
    equal = (triples.sort(dim=1).values[:, None] == training.sort(dim=1).values).all(dim=-1)
    remembered = (equal.double() @ signs).sign()
    return 0.5 + 0.5 * torch.where(equal.any(dim=1), remembered, votes[k])


@shaped
def grid_pairs(grids: Int[Tensor, "n c"], labels: Int[Tensor, "n"], queries: Int[Tensor, "b c"]) -> Float[Tensor, "b"]:
    """Answers of `known_pairs` on relational games: 1 for class 1, 0 for class 0, 0.5 for a guess.

    grids, labels: the training images; a cell holds an object or -1.  queries: test images; unseen objects below -1.
    """
    pairs_of_queries = _grid_pairs(queries)  # (b p)
    pairs, index = _grid_pairs(grids).unique(return_inverse=True)  # (k) distinct pairs, and (n p) which of them
    is_class = torch.stack((labels == 0, labels == 1))  # (2 n)
    counts = torch.stack([torch.bincount(index[rows].flatten(), minlength=len(pairs)) for rows in is_class])  # (2 k)
    # Leave one out: subtract how often a pair occurs in its own image.
    repeats = (index[:, :, None] == index[:, None]).sum(dim=-1)  # (n p)
    other_counts = counts[:, index] - is_class[..., None] * repeats  # (2 n p)
    without_evidence = _evidence(other_counts) == 0
    default = torch.zeros(())  # a guess
    if without_evidence.any():
        default = (labels[without_evidence].double().mean() - 0.5).sign()
    position = torch.searchsorted(pairs, pairs_of_queries).clamp(max=len(pairs) - 1)
    evidence = _evidence(counts[:, position] * (pairs[position] == pairs_of_queries))
    return torch.where(evidence == 0, default.to(evidence), evidence.sign()) / 2 + 0.5


def _evidence(counts: Tensor) -> Tensor:
    """The evidence (b) from counts (2 b p) of the pairs of an image in each class; exactly 0 for equal counts."""
    return torch.log((counts[1] + 1) / (counts[0] + 1.0)).sum(dim=-1).round(decimals=5)


def _grid_pairs(grids: Tensor) -> Tensor:
    """The pairs of objects as numbers (b p), without empty cells; all images of a game have equally many."""
    return _number(_pairs(grids[grids != -1].view(len(grids), -1)))


def _pairs(rows: Tensor) -> Tensor:
    """The pairs (n p 2) of the numbers of each row, the smaller one first."""
    return rows.sort(dim=1).values[:, torch.combinations(torch.arange(rows.shape[1]))]


def _number(pairs: Tensor) -> Tensor:
    """A unique number for each pair (... 2)."""
    return pairs[..., 0] * 2**20 + pairs[..., 1]
