"""SET: the rule, the triples of each split."""

import itertools
from collections import Counter

import pytest
import torch

from polyhead.tasks import SetCards
from polyhead.tasks.set_cards import CARDS, is_set

SPLITS = ("train", "validation", "compositional")


def by_hand(cards):
    return all(len({card[i] for card in cards}) in (1, 3) for i in range(4))


def test_sets_are_those_of_the_game():
    triples = torch.combinations(torch.arange(81), 3)
    found = is_set(torch.tensor(CARDS)[triples])
    assert (len(found), int(found.sum())) == (85320, 1080)
    for row in range(0, 85320, 37):
        assert found[row].item() == by_hand([CARDS[i] for i in triples[row]])


def test_no_triple_is_in_two_splits_and_half_are_sets():
    task = SetCards()
    every = Counter()
    for split, size in zip(SPLITS, (1080, 324, 756), strict=True):
        triples = task.triples(split).tolist()
        assert len(triples) == size
        every.update(frozenset(triple) for triple in triples)
        assert [by_hand([CARDS[i] for i in triple]) for triple in triples] == [False, True] * (size // 2)
    assert len(every) == sum(every.values()) == 2160
    assert {card for triple in task.triples("train").tolist() for card in triple} == set(range(81))
    assert torch.equal(SetCards(examples=25).triples("train"), task.triples("train")[:25])


@pytest.mark.parametrize("split", SPLITS)
def test_a_batch_shows_cards_of_its_split_in_any_order(split):
    task = SetCards(examples=30)
    batch = task.batch(split, 300, seed=0, step=0)
    allowed = {frozenset(CARDS[i] for i in triple) for triple in task.triples(split).tolist()}
    orders = set()
    for inputs, label, agree in zip(batch.inputs, batch.targets[:, 0].tolist(), batch.latents["agree"], strict=True):
        assert (inputs.unflatten(1, (4, 3)).sum(dim=-1) == 1).all()
        cards = [tuple(card) for card in inputs.unflatten(1, (4, 3)).argmax(dim=-1).tolist()]
        assert frozenset(cards) in allowed
        assert label == by_hand(cards)
        assert agree.tolist() == [len({card[i] for card in cards}) != 2 for i in range(4)]
        orders.add(tuple(sorted(range(3), key=cards.__getitem__)))
    assert orders == set(itertools.permutations(range(3)))
    assert 110 < batch.targets.sum() < 190
