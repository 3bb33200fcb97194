"""Training sets of a given size."""

import itertools
from collections import Counter

import torch

from polyhead.tasks.examples import distinct, picks, training_set, unseen


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_different_numbers_are_equally_likely():
    found = Counter(map(tuple, distinct(6000, 2, 4, generator()).tolist()))
    assert set(found) == set(itertools.permutations(range(4), 2))
    assert all(abs(times - 500) < 100 for times in found.values())
    assert (distinct(50, 5, 5, generator()).sort(dim=1).values == torch.arange(5)).all()


def drawer(asked):
    """Rows of two numbers of three: the kind, and one of 20."""
    g = generator(1)

    def draw(kinds):
        asked.append(len(kinds))
        return torch.stack((kinds % 3, picks(20, len(kinds), g)), 1)

    return draw


def test_a_training_set_repeats_nothing_and_keeps_its_kinds():
    rows = training_set(drawer(asked := []), 50)
    assert len(set(map(tuple, rows.tolist()))) == 50
    assert (rows[:, 0] == torch.arange(50) % 3).all()
    assert len(asked) > 1  # chance repeats some


def test_unseen_rows_are_not_in_the_training_set():
    rows = training_set(drawer([]), 50)
    fresh = unseen(drawer(asked := []), torch.arange(30), rows)
    assert not set(map(tuple, rows.tolist())) & set(map(tuple, fresh.tolist()))
    assert (fresh[:, 0] == torch.arange(30) % 3).all()
    assert len(asked) > 1


def test_columns_count_for_what_they_are():
    rows = torch.tensor([[0, 1], [-1, 2], [3, 3]])
    swapped = rows[:2].flip(1)
    assert (unseen(lambda kinds: swapped[kinds].clone(), torch.arange(2), rows) == swapped).all()
