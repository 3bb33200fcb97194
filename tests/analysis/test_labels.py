"""The labels of a probe, the views of a code, and the names of classes."""

import dataclasses

import pytest
import torch

from polyhead.analysis import class_name, targets, views
from polyhead.config import Batch
from polyhead.tasks import FuzzyLogic, Sraven


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


def test_of_sraven_the_last_tokens_rule_and_value() -> None:
    task = Sraven(features=3, values=5)
    batch = task.batch("compositional", 50, seed=0, step=0)
    found = targets(batch)
    assert list(found) == ["rule", "target value"]
    order, rules = batch.latents["permutations"], batch.latents["rules"]
    assert found["rule"].tolist() == [int(rules[b, order[b, 2, 2]]) for b in range(50)]
    assert found["target value"].tolist() == batch.latents["panels"][:, 2, 2, 2].tolist()
    assert (found["rule"] != rules[:, -1].numpy()).any()


def test_targets_of_fuzzy_logic_are_its_terms_alone() -> None:
    assert list(targets(FuzzyLogic().batch("iid", 4, seed=0, step=0))) == ["term 1", "term 2"]


def test_the_views_of_a_task() -> None:
    fuzzy, raven = FuzzyLogic(), Sraven(features=2, values=5)
    assert views(fuzzy) == {"self": (fuzzy, ((-1, -1),))}
    plain = dataclasses.replace(raven, permuted=False)
    assert views(raven) == {"self": (raven, ((-1, -1),)), "last_row": (plain, ((-1, 13), (-1, 15)))}
    # those keys show the query's feature: the last of the panels to its left
    panels = plain.batch("iid", 8, seed=0, step=0).latents["panels"]
    tokens = panels.flatten(1)
    assert tokens[:, [13, 15]].tolist() == panels[:, 2, :2, 1].tolist()


@pytest.mark.parametrize(
    ("task", "target", "names"),
    [
        (
            Sraven(),
            "rule",
            ["constant", "+1", "+2", "−1", "−2", "sum", "difference", "distribute-three"],
        ),
        (Sraven(features=2, grid=2), "rule", ["constant", "+1", "+2", "−1", "−2", "sum", "difference", "distribute"]),
        (Sraven(), "target value", ["0", "1"]),
        (FuzzyLogic(variables=3), "term 2", ["¬x₁¬x₂¬x₃", "¬x₁¬x₂x₃", "¬x₁x₂¬x₃", "¬x₁x₂x₃", "x₁¬x₂¬x₃"]),
    ],
)
def test_names_of_classes(task: object, target: str, names: list[str]) -> None:
    assert [class_name(task, target, i) for i in range(len(names))] == names
