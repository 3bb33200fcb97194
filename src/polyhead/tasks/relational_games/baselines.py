"""A baseline of relational games: the score of a learner that knows the training objects but no relation.

The learner treats an object as a name and does not use whether two names are equal.  It remembers the classes of the
training images in which a pair of names occurred.  n_c(a, b) counts how often a and b occur together in a training
image of class c, in any cells.  The learner adds the evidence of all pairs of an image as if they were independent:

    evidence = Σ_{pairs of cells} log (n_1(a, b) + 1) / (n_0(a, b) + 1)        class 1 where it is above 0, 0 below

Without evidence it answers the majority class of the training images that have no evidence from the other training
images (leave one out); it guesses on a tie.  Example: of n training images of `same` with m objects it knows a share
of 1 - (1 - 1/m)^(n/2) of class 1, and answers 0 for everything else.  So it scores 0.5 + 0.5 share, and 0.5 with shapes
that are not in training.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.spec.shapes import shaped


@shaped
def known_pairs(grids: Int[Tensor, "n c"], labels: Int[Tensor, "n"], queries: Int[Tensor, "b c"]) -> Float[Tensor, "b"]:
    """The learner's answers: 1 for class 1, 0 for class 0, 0.5 for a guess.

    grids, labels: the training images; a cell holds an object or -1.  queries: test images; unseen objects below -1.
    """
    pairs_of_queries = _pairs(queries)
    pairs, index = _pairs(grids).unique(return_inverse=True)
    counts = torch.stack([torch.bincount(index[labels == c].flatten(), minlength=len(pairs)) for c in (0, 1)])
    # Leave one out: subtract how often a pair occurs in its own image.
    repeats = (index[:, :, None] == index[:, None]).sum(dim=-1)
    other_counts = counts[:, index] - torch.stack((labels == 0, labels == 1))[..., None] * repeats
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


def _pairs(grids: Tensor) -> Tensor:
    """The unordered pairs of objects as numbers (b p), without empty cells; all images of a game have equally many."""
    filled = grids[grids != -1].view(len(grids), -1).sort(dim=1).values
    first, second = torch.combinations(torch.arange(filled.shape[1], device=grids.device)).T
    return filled[:, first] * 2**20 + filled[:, second]
