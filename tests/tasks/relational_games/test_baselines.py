"""The baseline of a learner without relations: by hand, and by its derivation."""

import pytest
import torch

from polyhead.tasks import RelationalGames
from polyhead.tasks.relational_games.baselines import known_pairs

E = -1  # an empty cell


def test_by_hand():
    grids = torch.tensor([[1, 1, E], [E, 1, 2], [3, E, 3], [4, 5, E]])
    labels = torch.tensor([1, 0, 1, 0])
    asked = torch.tensor([[E, 1, 1], [2, E, 1], [2, 2, E], [7, 8, E], [3, 3, E], [-3, -3, E]])
    # No training image says anything about another, two are of either class: without evidence it guesses.
    assert known_pairs(grids, labels, asked).tolist() == [1, 0, 0.5, 0.5, 1, 0.5]
    # One more of class 0 and the unknown is class 0.
    more = torch.cat((grids, torch.tensor([[6, E, 7]]))), torch.cat((labels, torch.tensor([0])))
    assert known_pairs(*more, asked).tolist() == [1, 0, 0, 0, 1, 0]


def test_pairs_add_up():
    grids = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 3, 5], [2, 3, 6]])
    labels = torch.tensor([1, 1, 0, 0])
    # Of 1 and 2: log 3 for class 1; of 1 and 3, 2 and 3: once in either, 0; of 3 and 5 (1 and 5): log 2 for class 0.
    asked = torch.tensor([[2, 9, 1], [5, 3, 9], [5, 1, 2], [1, 5, 3]])
    assert known_pairs(grids, labels, asked).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("examples", [500, 2000])
def test_same_as_derived(examples):
    found = RelationalGames("same", examples).baselines("iid")["known_pairs"]
    share = 1 - (1 - 1 / 851) ** (examples / 2)
    assert abs(found.mean - (0.5 + 0.5 * share)) < 3 * found.standard_error
    for split in ("novel", "novel_stripes"):
        assert RelationalGames("same", examples).baselines(split)["known_pairs"].mean == 0.5


def test_the_published_images_name_no_objects():
    assert list(RelationalGames("same", data="original").baselines("iid")) == ["chance"]
