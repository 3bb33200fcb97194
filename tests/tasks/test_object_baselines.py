"""Baselines of learners that treat objects as names: by hand, and by their derivations."""

import math
from collections import Counter

import pytest
import torch

from polyhead.tasks import ObjectSorting, PairwiseOrder, SetCards
from polyhead.tasks.object_baselines import card_pairs
from polyhead.tasks.object_sorting import _pool

# ------------------------------------------------------------------------------------------------------- pairwise order


@pytest.mark.parametrize(("split", "examples"), [("ordered", None), ("unordered", None), ("ordered", 40)])
def test_baselines_of_pairwise_order(split, examples):
    task = PairwiseOrder(split=split, examples=examples, split_seed=2)
    met = {tuple(pair) for pair in task.pairs_of("train").tolist()}
    asked = task.pairs_of("compositional").tolist()
    reverse = sum((b, a) in met for a, b in asked) / len(asked)
    assert (reverse > 0) == (split == "ordered")
    found = task.baselines("compositional")
    assert list(found) == ["chance", "known_pairs", "known_objects"]
    assert found["known_pairs"].mean == pytest.approx(0.5 + 0.5 * reverse)
    first, pairs = [0] * 64, [0] * 64
    for pair in met:
        first[min(pair)] += 1
        for each in pair:
            pairs[each] += 1
    share = [(f + 1) / (n + 2) for f, n in zip(first, pairs, strict=True)]
    right = [(share[a] > share[b]) == (a < b) if share[a] != share[b] else 0.5 for a, b in asked]
    assert found["known_objects"].mean == pytest.approx(sum(right) / len(right))
    assert {score.count for score in found.values()} == {0}  # all pairs: exact
    assert task.baselines("train")["known_pairs"].mean == 1


# -------------------------------------------------------------------------------------------------------------- sorting


@pytest.mark.parametrize(("examples", "length"), [(3, 4), (100, 6), (600, 4)])
def test_baselines_of_sorting(examples, length):
    """As counted here, sequence by sequence, of the task's own training set."""
    task = ObjectSorting(length=length, examples=examples, split_seed=2)
    places = {}
    for row in _pool(task, torch.device("cpu")).tolist():
        for thing in row:
            places.setdefault(thing, []).append(sum(other < thing for other in row))
    mean = {thing: sum(p) / len(p) for thing, p in places.items()}
    right = 0.0
    for row in task.batch("iid", 300, seed=4, step=0).latents["objects"].tolist():
        numbers = [mean.get(thing, (length - 1) / 2) for thing in sorted(row)]
        ties = math.prod(math.factorial(times) for times in Counter(numbers).values())
        right += (sorted(numbers) == numbers) / ties
    found = task.baselines("iid", sequences=300, seed=4)
    assert found["known_objects"].mean == pytest.approx(right / 300)
    assert found["chance"].mean == pytest.approx(1 / math.factorial(length))


# ------------------------------------------------------------------------------------------------------------------ SET
def test_pairs_of_cards_by_hand():
    met = torch.tensor([[2, 0, 1], [0, 3, 6], [0, 1, 4], [5, 7, 8]])
    sets = torch.tensor([1.0, 1.0, 0.0, 0.0])
    #        met,  one pair,  none, two pairs: no example, met, one pair, met in another order
    asked = torch.tensor([[0, 1, 2], [0, 2, 5], [9, 10, 11], [0, 1, 3], [4, 1, 0], [7, 6, 3], [1, 2, 0]])
    # No pair: two sets (their own left out) against one other.  One pair: the third triple, which is none.
    assert card_pairs(met, sets, asked).tolist() == [1, 0, 1, 0.5, 0, 0, 1]
    # With one more triple without a known pair the vote of those is even.
    more = torch.cat((met, torch.tensor([[12, 13, 15]]))), torch.cat((sets, torch.zeros(1)))
    assert card_pairs(*more, asked).tolist() == [1, 0, 0.5, 0.5, 0, 0, 1]


@pytest.mark.parametrize("examples", [200, 1080])
def test_baselines_of_set(examples):
    task, p = SetCards(examples, split_seed=1), examples / 2 / 1080
    found = task.baselines("compositional")
    assert list(found) == ["chance", "known_pairs"]
    assert found["known_pairs"].mean == pytest.approx(0.5 + 0.5 * (1 - (1 - p) ** 3), abs=0.025)
    assert task.baselines("train")["known_pairs"].mean == 1
