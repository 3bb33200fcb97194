"""Baselines and ceiling of SRAVEN: the accuracy without composing rules, and the best possible accuracy.

    chance               every symbol of the last panel at random: values^-features
    copy_left            the panel to the left of the last one
    same_slot            knows the rules, but assumes that a feature has the same slot in all columns: for each slot the
                         most probable answer of a single rule, or the symbol to the left if none fits.  Only for
                         permuted columns; without permutation the assumption is true
    known_combinations   Bayes-optimal over the training multisets of rules; copies the panel to the left if none of
                         them fits.  On splits of training multisets it is a little above the ceiling
    ceiling              Bayes-optimal over all multisets of the family, without knowing the split: the score of a
                         solver that combines rules freely (`ambiguity.bayes`)

The last two search all correspondences.  Above `ambiguity.SEARCHED_CORRESPONDENCES` they are omitted.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.tasks.base import Batch
from polyhead.tasks.scores import Score, scores_in_parts
from polyhead.tasks.sraven.ambiguity import SEARCHED_CORRESPONDENCES, bayes, chances, correspondences, rules_that_fit
from polyhead.tasks.sraven.task import Sraven

CHUNK = 500  # sequences at once


def baselines(task: Sraven, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
    """Accuracy on `split` of every baseline and of the ceiling, over `sequences` sequences of stream `seed`."""

    def score(batch: Batch) -> dict[str, Tensor]:
        panels = batch.latents["panels"]
        values = {"copy_left": hits(copy_left(panels), panels)}
        if task.permuted:
            values["same_slot"] = hits(same_slot(panels, task), panels)
        if correspondences(task) <= SEARCHED_CORRESPONDENCES:
            values["known_combinations"] = known_combinations(panels, task)
            values["ceiling"], _ = bayes(panels, task)
        return values

    table = {"chance": Score(float(task.values) ** -task.features)}
    return table | scores_in_parts(score, task, split, sequences, seed, size=CHUNK)


def known_combinations(panels: Int[Tensor, "b g g m"], task: Sraven) -> Float[Tensor, "b"]:
    """For each instance, the accuracy of the solver that knows only the training multisets."""
    remembered, answers = bayes(panels, task, rules=task.rules("train"))
    return torch.where(answers == 0, hits(copy_left(panels), panels), remembered)


def hits(answers: Int[Tensor, "b m"], panels: Int[Tensor, "b g g m"]) -> Float[Tensor, "b"]:
    """1 if the whole last panel is right (b)."""
    return (answers == panels[:, -1, -1]).all(dim=-1).double()


def copy_left(panels: Int[Tensor, "b g g m"]) -> Int[Tensor, "b m"]:
    """The panel to the left of the last one."""
    return panels[:, -1, -2]


def same_slot(panels: Int[Tensor, "b g g m"], task: Sraven) -> Int[Tensor, "b m"]:
    """For each slot, the most probable answer under a single rule, as if no column were permuted."""
    fits, answers = rules_that_fit(panels, task, distinct=True)  # (b m r)
    mass = torch.zeros(*fits.shape[:2], task.values, dtype=torch.float64, device=panels.device)
    mass = mass.scatter_add(2, answers, fits * chances(task, panels.device))
    return torch.where(fits.any(dim=-1), mass.argmax(dim=-1), copy_left(panels))
