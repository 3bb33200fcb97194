"""Tasks on objects: sorting, pairwise order, SET; and the baselines of learners that treat objects as names."""

import itertools
import math
from collections import Counter

import pytest
import torch

from polyhead.tasks import ObjectSorting, PairwiseOrder, RelationalGames, SetCards
from polyhead.tasks.object_baselines import card_pairs, grid_pairs
from polyhead.tasks.object_sorting import _pool, sorting_order
from polyhead.tasks.set_cards import CARDS, is_set

SPLITS = ("train", "validation", "compositional")


# -------------------------------------------------------------------------------------------------------------- sorting
@pytest.mark.parametrize("split", ["train", "validation", "iid"])
def test_targets_sort_the_vectors_that_are_read(split):
    task = ObjectSorting(length=6, examples=40)
    batch = task.batch(split, 30, seed=1, step=2)
    vectors = task.vectors()
    assert batch.source.shape == (30, 6, task.source.size)
    assert batch.scored.all()
    assert batch.mask is batch.source_mask is None
    for source, inputs, targets in zip(batch.source, batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        objects = [int((vectors == vector).all(dim=1).nonzero()) for vector in source]
        assert len(set(objects)) == 6
        assert [objects[i] for i in targets] == sorted(objects)
        assert inputs == [6, *targets[:-1]]


def test_products_are_ordered_by_their_first_part():
    vectors = ObjectSorting().vectors()
    assert vectors.shape == (48, 12)
    for i, j in itertools.combinations(range(48), 2):
        assert torch.equal(vectors[i, :4], vectors[j, :4]) == (i // 12 == j // 12)
        assert torch.equal(vectors[i, 4:], vectors[j, 4:]) == (i % 12 == j % 12)
    assert not torch.equal(vectors, ObjectSorting(split_seed=1).vectors())


def sequences(batch):
    return set(map(tuple, batch.latents["objects"].tolist()))


def test_splits_share_no_sequence_and_training_is_a_set_of_so_many():
    task = ObjectSorting(length=2, examples=1100)  # of 2256
    train = set().union(*(sequences(task.batch("train", 3000, seed=s, step=0)) for s in range(9)))
    assert len(train) == 1100
    assert any((b, a) in train for a, b in train)  # another order is another sequence
    for split in task.splits[1:]:
        assert not train & sequences(task.batch(split, 300, seed=0, step=0))


def test_novel_vectors_are_off_by_noise():
    task = ObjectSorting(noise=0.5)
    batch = task.batch("novel", 400, seed=0, step=0)
    noise = batch.source - task.vectors()[batch.latents["objects"]]
    assert abs(noise.std() - 0.5) < 0.01
    assert abs(noise.mean()) < 0.01
    assert torch.equal(batch.targets, sorting_order(batch.latents["objects"]))
    clean = ObjectSorting(noise=0.0).batch("novel", 5, seed=0, step=0)
    torch.testing.assert_close(clean.source, task.vectors()[clean.latents["objects"]], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------- pairwise order
def pairs(task, split):
    return list(map(tuple, task.pairs_of(split).tolist()))


def test_pairs_are_dealt_once():
    task = PairwiseOrder(10)
    all_pairs = [pair for name in SPLITS for pair in pairs(task, name)]
    assert len(all_pairs) == 90
    assert set(all_pairs) == set(itertools.permutations(range(10), 2))


@pytest.mark.parametrize("split", SPLITS)
def test_labels_follow_from_the_vectors(split):
    task = PairwiseOrder(12, dim=3)
    batch = task.batch(split, 200, seed=0, step=0)
    assert batch.inputs.shape == (200, 2, 3)
    assert batch.targets.shape == batch.scored.shape == (200, 1)
    vectors, drawn_pairs = task.vectors(), set()
    for pair, label in zip(batch.inputs, batch.targets[:, 0].tolist(), strict=True):
        i, j = (int((vectors == vector).all(dim=1).nonzero()) for vector in pair)
        assert label == (i < j)
        drawn_pairs.add((i, j))
    assert drawn_pairs <= set(pairs(task, split))
    assert len(drawn_pairs) > 0.9 * len(pairs(task, split))


# ------------------------------------------------------------------------------------------------------------------ SET
def is_set_by_hand(cards):
    return all(len({card[i] for card in cards}) in (1, 3) for i in range(4))


def test_sets_are_those_of_the_game():
    triples = torch.combinations(torch.arange(81), 3)
    are_sets = is_set(torch.tensor(CARDS)[triples])
    assert (len(are_sets), int(are_sets.sum())) == (85320, 1080)
    for row in range(0, 85320, 37):
        assert are_sets[row].item() == is_set_by_hand([CARDS[i] for i in triples[row]])


def test_no_triple_is_in_two_splits_and_half_are_sets():
    task = SetCards()
    occurrences = Counter()
    for split, size in zip(SPLITS, (1080, 324, 756), strict=True):
        triples = task.triples(split).tolist()
        assert len(triples) == size
        occurrences.update(frozenset(triple) for triple in triples)
        assert [is_set_by_hand([CARDS[i] for i in triple]) for triple in triples] == [False, True] * (size // 2)
    assert len(occurrences) == sum(occurrences.values()) == 2160
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
        assert label == is_set_by_hand(cards)
        assert agree.tolist() == [len({card[i] for card in cards}) != 2 for i in range(4)]
        orders.add(tuple(sorted(range(3), key=cards.__getitem__)))
    assert orders == set(itertools.permutations(range(3)))
    assert 110 < batch.targets.sum() < 190


# ------------------------------------------------------------------------------------------------------------ baselines
@pytest.mark.parametrize("examples", [None, 40])
def test_baselines_of_pairwise_order(examples):
    task = PairwiseOrder(examples=examples, split_seed=2)
    trained = {tuple(pair) for pair in task.pairs_of("train").tolist()}
    unseen = task.pairs_of("compositional").tolist()
    reverse = sum((b, a) in trained for a, b in unseen) / len(unseen)
    assert reverse > 0
    scores = task.baselines("compositional")
    assert list(scores) == ["chance", "known_pairs", "known_objects"]
    assert scores["known_pairs"].mean == pytest.approx(0.5 + 0.5 * reverse)
    smaller, appearances = [0] * 64, [0] * 64
    for pair in trained:
        smaller[min(pair)] += 1
        for item in pair:
            appearances[item] += 1
    share = [(s + 1) / (n + 2) for s, n in zip(smaller, appearances, strict=True)]
    correct = [(share[a] > share[b]) == (a < b) if share[a] != share[b] else 0.5 for a, b in unseen]
    assert scores["known_objects"].mean == pytest.approx(sum(correct) / len(correct))
    assert {score.count for score in scores.values()} == {0}  # all pairs: exact
    assert task.baselines("train")["known_pairs"].mean == 1


@pytest.mark.parametrize(("examples", "length"), [(3, 4), (100, 6), (600, 4)])
def test_baselines_of_sorting(examples, length):
    """As counted here, sequence by sequence, of the task's own training set."""
    task = ObjectSorting(length=length, examples=examples, split_seed=2)
    ranks_of = {}
    for row in _pool(task, torch.device("cpu")).tolist():
        for item in row:
            ranks_of.setdefault(item, []).append(sum(other < item for other in row))
    mean_rank = {item: sum(ranks_of_item) / len(ranks_of_item) for item, ranks_of_item in ranks_of.items()}
    correct = 0.0
    for row in task.batch("iid", 300, seed=4, step=0).latents["objects"].tolist():
        mean_ranks = [mean_rank.get(item, (length - 1) / 2) for item in sorted(row)]
        ties = math.prod(math.factorial(times) for times in Counter(mean_ranks).values())
        correct += (sorted(mean_ranks) == mean_ranks) / ties
    scores = task.baselines("iid", sequences=300, seed=4)
    assert scores["known_objects"].mean == pytest.approx(correct / 300)
    assert scores["chance"].mean == pytest.approx(1 / math.factorial(length))


def test_pairs_of_cards_by_hand():
    trained = torch.tensor([[2, 0, 1], [0, 3, 6], [0, 1, 4], [5, 7, 8]])
    sets = torch.tensor([1.0, 1.0, 0.0, 0.0])
    #    trained,  one pair,  none, two pairs: no example, trained, one pair, trained in another order
    queries = torch.tensor([[0, 1, 2], [0, 2, 5], [9, 10, 11], [0, 1, 3], [4, 1, 0], [7, 6, 3], [1, 2, 0]])
    # No pair: two sets (their own left out) against one other.  One pair: the third triple, which is none.
    assert card_pairs(trained, sets, queries).tolist() == [1, 0, 1, 0.5, 0, 0, 1]
    # With one more triple without a known pair the vote of those is even.
    extended = torch.cat((trained, torch.tensor([[12, 13, 15]]))), torch.cat((sets, torch.zeros(1)))
    assert card_pairs(*extended, queries).tolist() == [1, 0, 0.5, 0.5, 0, 0, 1]


E = -1  # an empty cell


def test_pairs_in_grids_by_hand():
    grids = torch.tensor([[1, 1, E], [E, 1, 2], [3, E, 3], [4, 5, E]])
    labels = torch.tensor([1, 0, 1, 0])
    queries = torch.tensor([[E, 1, 1], [2, E, 1], [2, 2, E], [7, 8, E], [3, 3, E], [-3, -3, E]])
    # No training image says anything about another, two are of either class: without evidence it guesses.
    assert grid_pairs(grids, labels, queries).tolist() == [1, 0, 0.5, 0.5, 1, 0.5]
    # One more of class 0 and the unknown is class 0.
    extended = torch.cat((grids, torch.tensor([[6, E, 7]]))), torch.cat((labels, torch.tensor([0])))
    assert grid_pairs(*extended, queries).tolist() == [1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("examples", [500, 2000])
def test_baselines_of_same(examples):
    score = RelationalGames("same", examples).baselines("iid")["known_pairs"]
    share = 1 - (1 - 1 / 851) ** (examples / 2)
    assert abs(score.mean - (0.5 + 0.5 * share)) < 3 * score.standard_error
    for split in ("novel", "novel_stripes"):
        assert RelationalGames("same", examples).baselines(split)["known_pairs"].mean == 0.5
