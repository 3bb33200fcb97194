"""Symbolic Raven: baselines and ceiling, and the numbers of tasks and instances."""

import itertools

import pytest
import torch

from polyhead.tasks import Sraven
from polyhead.tasks.sraven import counts as sraven_counts
from polyhead.tasks.sraven.baselines import copy_left, same_slot

NAMES = ["chance", "copy_left", "same_slot", "known_combinations", "ceiling"]


def test_baselines_and_ceiling_of_the_paper_task():
    task = Sraven()
    known_scores, unseen_scores = (task.baselines(split, sequences=1000) for split in ("iid", "compositional"))
    for table in (known_scores, unseen_scores):
        assert list(table) == NAMES
        assert (table["chance"].mean, table["chance"].standard_error) == (8**-4, 0)
        assert table["copy_left"].mean < 0.01
        assert table["same_slot"].mean < 0.02
        assert abs(table["ceiling"].mean - 0.92) < 0.03
        assert {name: score.count for name, score in table.items()} == dict.fromkeys(NAMES, 1000) | {"chance": 0}
    assert known_scores["known_combinations"].mean >= known_scores["ceiling"].mean
    assert 0.02 < unseen_scores["known_combinations"].mean < 0.1  # remembered combinations do not help with others


@pytest.mark.parametrize(
    ("task", "names"),
    [
        (Sraven(permuted=False), [name for name in NAMES if name != "same_slot"]),  # there it ignores nothing
        (Sraven(features=7, held_out=0.5), NAMES[:3]),  # too many correspondences to search
    ],
    ids=["one order", "many features"],
)
def test_baselines_that_a_task_cannot_have(task, names):
    assert list(task.baselines("iid", sequences=20)) == names


def test_same_slot_solves_what_is_not_permuted_and_copies_what_it_cannot_explain():
    task = Sraven()
    straight = Sraven(permuted=False).batch("iid", 400, seed=0, step=0).latents["panels"]
    assert ((same_slot(straight, task) == straight[:, -1, -1]).all(dim=-1)).double().mean() > 0.9
    unexplained = torch.tensor([[[1, 2, 4], [7, 2, 6], [3, 5, 0]]])[..., None].expand(-1, -1, -1, 4)  # no rule fits
    assert same_slot(unexplained, task).tolist() == [[5, 5, 5, 5]] == copy_left(unexplained).tolist()


@pytest.mark.parametrize(("features", "grid"), [(1, 3), (2, 4), (3, 2)])
def test_the_exact_count_of_tasks_is_that_of_what_the_generator_chooses(features, grid):
    permutations = list(itertools.permutations(range(features)))
    tasks = set()
    for rules in itertools.combinations_with_replacement(range(8), features):
        for columns in itertools.product(permutations, repeat=grid):
            # A task is which rule governs the features, named by their slots, and which slots belong together.
            tasks.add(frozenset((*(c.index(i) for c in columns), rules[i]) for i in range(features)))
    assert sraven_counts.tasks(features, grid).exact == len(tasks)
