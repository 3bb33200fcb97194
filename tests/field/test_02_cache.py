"""A cache across turns of a conversation: what it stores does not depend on the numbers in a mask."""

import pytest
import torch
import zoo
from refusals import refused
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import Cache, LayerCache

TOKENS = torch.tensor([[5, 7, 2, 9, 1, 4, 3], [3, 8, 6, 2, 0, 7, 1]])
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1]]).bool()
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 3, 4, 5]])
TURNS = ((0, 3), (3, 5), (5, 7))


@pytest.fixture(params=[None, 2], ids=str)
def model(request):
    """A causal model in float64, far from its initial values."""
    settings = ph.TransformerConfig(
        ph.Tokens(10), ph.Logits(10), dim=16, layers=2, causal=True, positions=ph.Rotary(), window=request.param,
        heads=[ph.Softmax(2), ph.Linear(1), ph.Hyla(1)],
    )  # fmt: skip
    return zoo.make_model(settings)


def test_padding_in_the_second_turn_after_a_first_turn_without(model):
    """The first turn gives neither mask nor positions, the later ones both.  More kinds are in test_02_hf_cache.py."""
    cache, turns = Cache(2), []
    for first, last in TURNS:
        limits = {} if first == 0 else {"mask": REAL[:, first:last], "positions": POSITIONS[:, first:last]}
        turns.append(model(TOKENS[:, first:last], cache=cache, **limits))
    logits, expected = torch.cat(turns, dim=1), model(TOKENS, mask=REAL, positions=POSITIONS)
    assert_close(logits[REAL], expected[REAL], atol=1e-10, rtol=1e-10)


def test_positions_of_one_row_then_of_each_row():
    layer, x = zoo.make_layer([ph.Softmax(4)], causal=True, positions=ph.Rotary()), zoo.tokens(5)
    cache, later = LayerCache(), torch.tensor([[3, 4], [6, 9]])
    pieces = [layer(x[:, :3], positions=torch.arange(3)[None], cache=cache)]
    pieces.append(layer(x[:, 3:], positions=later, cache=cache))
    positions = torch.cat((torch.arange(3).expand(2, 3), later), dim=1)
    assert_close(torch.cat(pieces, dim=1), layer(x, positions=positions), atol=1e-10, rtol=1e-10)


def test_a_mask_that_hides_nothing_changes_nothing_that_is_stored(model):
    """Two caches of one conversation have the same size, whatever the numbers in the mask."""
    sizes = []
    for mask in (REAL, torch.ones_like(REAL)):
        cache = Cache(2)
        for first, last in TURNS:
            model(TOKENS[:, first:last], mask=mask[:, first:last], positions=POSITIONS[:, first:last], cache=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]


def test_positions_that_stop_are_refused():
    layer, x, cache = zoo.make_layer([ph.Softmax(4)], causal=True, positions=ph.Rotary()), zoo.tokens(4), LayerCache()
    layer(x[:, :3], positions=torch.arange(2, 5)[None], cache=cache)
    text = "^MultiHeadAttention: an earlier call with this cache gave positions; give those of the new tokens, too$"
    refused(lambda: layer(x[:, 3:], cache=cache), text)
