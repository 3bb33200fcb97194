"""The labels of a probe, the views of a code, and the names of classes."""

import dataclasses

import torch

from polyhead.analysis import targets, views
from polyhead.tasks import FuzzyLogic, Sraven
from polyhead.tasks.base import Batch


def batch_of(values: torch.Tensor, latents: dict[str, torch.Tensor]) -> Batch:
    return Batch(values, values, None, torch.ones(values.shape[:2], dtype=torch.bool), latents)


def test_every_latent_of_whole_numbers_has_a_name() -> None:
    latents = {"terms": torch.tensor([[1, 5], [2, 3]]), "rule": torch.tensor([4, 4]), "noise": torch.rand(2, 3)}
    latents |= {"flags": torch.ones(2, 3, dtype=torch.bool), "panels": torch.ones(2, 3, 3, dtype=torch.long)}
    found = targets(batch_of(torch.rand(2, 4, 1), latents))
    assert {name: values.tolist() for name, values in found.items()} == {
        "term 1": [1, 2],
        "term 2": [5, 3],
        "rule": [4, 4],
    }


def test_the_views_of_a_task() -> None:
    fuzzy, raven = FuzzyLogic(), Sraven(features=2, values=5)
    assert views(fuzzy) == {"self": (fuzzy, ((-1, -1),))}
    plain = dataclasses.replace(raven, permuted=False)
    assert views(raven) == {"self": (raven, ((-1, -1),)), "last_row": (plain, ((-1, 13), (-1, 15)))}
    # those keys show the query's feature: the last of the panels to its left
    panels = plain.batch("iid", 8, seed=0, step=0).latents["panels"]
    tokens = panels.flatten(1)
    assert tokens[:, [13, 15]].tolist() == panels[:, 2, :2, 1].tolist()
    assert Sraven(features=3, grid=4).pairs["last_row"] == ((-1, 38), (-1, 41), (-1, 44))


def test_the_last_rule_has_a_name_by_the_size_of_the_grid() -> None:
    names = [Sraven(features=2, grid=grid).class_name("rule", 7) for grid in (2, 3)]
    assert names == ["distribute", "distribute-three"]
