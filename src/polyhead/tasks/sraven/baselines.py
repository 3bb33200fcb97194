"""Baselines and ceiling of SRAVEN: the accuracy without composing rules, and the best possible accuracy.

    chance               every symbol of the last panel at random: values^-features
    copy_left            the panel to the left of the last one
    symbol_counts        knows no rule and no correspondence, only where answers occurred in training: for each
                         slot of the last panel, naive Bayes over the shown panels,

                             argmax_v Σ_panels log P(slot_v, count_v | v is the answer) / P(slot_v, count_v | it is not)

                         slot_v: whether v is in the same slot of the panel; count_v: how many of its slots hold v.  It
                         copies from slots where copies were right in training.  The frequencies are from `TRAINED`
                         sequences of the training split, with one added to each count
    same_slot            knows the rules, but assumes that a feature has the same slot in all columns: for each slot the
                         most probable answer of a single rule, or the symbol to the left if none fits.  Only for
                         permuted columns; without permutation the assumption is true
    known_combinations   Bayes-optimal over the training multisets of rules; copies the panel to the left if none of
                         them fits.  On splits of training multisets it is a little above the ceiling
    ceiling              Bayes-optimal over all multisets of the family, without knowing the split: the score of a
                         solver that combines rules freely (`ambiguity.bayes`)

The last two search all correspondences.  Above `ambiguity.SEARCHED_CORRESPONDENCES` they are omitted.
"""

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from polyhead.config import Batch
from polyhead.spec.shapes import shaped
from polyhead.tasks.sraven.ambiguity import SEARCHED_CORRESPONDENCES, bayes, chances, correspondences, rules_that_fit
from polyhead.tasks.sraven.task import Sraven
from polyhead.tasks.task import Score, scores_in_parts

CHUNK = 500  # sequences at once
TRAINED = 4000  # training sequences that `symbol_counts` counts


def baselines(task: Sraven, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
    """Accuracy on `split` of every baseline and of the ceiling, over `sequences` sequences of stream `seed`.

    Raises ValueError for an unknown split, or no sequences.
    """

    def score(batch: Batch) -> dict[str, Tensor]:
        panels = batch.latents["panels"]
        values = {
            "copy_left": hits(copy_left(panels), panels),
            "symbol_counts": hits(symbol_counts(panels, _learned(task).to(panels.device), task.values), panels),
        }
        if task.permuted:
            values["same_slot"] = hits(same_slot(panels, task), panels)
        if correspondences(task) <= SEARCHED_CORRESPONDENCES:
            values["known_combinations"] = known_combinations(panels, task)
            values["ceiling"], _ = bayes(panels, task)
        return values

    table = {"chance": Score(float(task.values) ** -task.features, 0.0, 0)}
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


@shaped
def symbol_counts(panels: Int[Tensor, "b g g m"], weights: Float[Tensor, "m p n"], values: int) -> Int[Tensor, "b m"]:
    """For each slot, the symbol with the most evidence; `weights` come from `evidence`."""
    states = _states(panels, values)
    slots = torch.arange(states.shape[1], device=panels.device)[:, None, None]
    shown_panels = torch.arange(states.shape[3], device=panels.device)
    return weights[slots, shown_panels, states].sum(dim=-1).argmax(dim=-1)


@shaped
def evidence(panels: Int[Tensor, "b g g m"], values: int) -> Float[Tensor, "m p n"]:
    """For each slot, panel and state (2 count_v + slot_v): log of its frequency for answers over non-answers."""
    m, num_panels, num_states = panels.shape[-1], panels.shape[1] ** 2 - 1, 2 * panels.shape[-1] + 2
    slots = torch.arange(m, device=panels.device)[:, None, None]
    shown_panels = torch.arange(num_panels, device=panels.device)
    counts = torch.ones(2, m, num_panels, num_states, dtype=torch.double, device=panels.device)
    for part in panels.split(CHUNK):
        is_other = 1 - F.one_hot(part[:, -1, -1], values)[..., None]  # (b m v 1)
        # The place of each state (b m v p) in `counts`.
        places = ((is_other * m + slots) * num_panels + shown_panels) * num_states + _states(part, values)
        counts += torch.bincount(places.flatten(), minlength=counts.numel()).view(counts.shape)
    answer, other = (counts / counts.sum(dim=-1, keepdim=True)).log()
    return answer - other


def _states(panels: Tensor, values: int) -> Tensor:
    """The state of a slot, symbol and shown panel (b m v p): 2 count_v + slot_v."""
    one_hot = F.one_hot(panels.flatten(1, 2)[:, :-1], values)  # (b p m v)
    return (one_hot + 2 * one_hot.sum(dim=2, keepdim=True)).permute(0, 2, 3, 1)


@functools.lru_cache(maxsize=64)
def _learned(task: Sraven) -> Tensor:
    """The evidence from `TRAINED` training sequences."""
    parts = [task.batch("train", CHUNK, seed=0, step=step).latents["panels"] for step in range(TRAINED // CHUNK)]
    return evidence(torch.cat(parts), task.values)


def same_slot(panels: Int[Tensor, "b g g m"], task: Sraven) -> Int[Tensor, "b m"]:
    """For each slot, the most probable answer under a single rule, as if no column were permuted."""
    fits, answers = rules_that_fit(panels, task, distinct=True)  # (b m r)
    mass = torch.zeros(*fits.shape[:2], task.values, dtype=torch.float64, device=panels.device)
    mass = mass.scatter_add(2, answers, fits * chances(task, panels.device))
    return torch.where(fits.any(dim=-1), mass.argmax(dim=-1), copy_left(panels))
