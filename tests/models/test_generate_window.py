"""A layer with a window stores only keys that later tokens can see, and decoding is still exact."""

from dataclasses import replace

import pytest
import torch
import zoo
from torch.testing import assert_close
from zoo import make_model as make

import polyhead as ph
from polyhead.layers.cache import Cache

F64 = torch.float64
BASE = ph.TransformerConfig(ph.Tokens(12), ph.Logits(12), dim=16, layers=2, max_length=40, causal=True, window=4)
GROUPED = replace(BASE, heads=ph.Softmax(4, kv_heads=2), positions=ph.Rotary())
MODELS = zoo.models(zoo.FEW, max_length=40)


@pytest.mark.parametrize(("name", "window"), [(name, window) for name in MODELS for window in (1, 4)])
@torch.no_grad()
def test_decoding_is_exact_and_its_memory_bounded(name, window):
    model, x = make(replace(MODELS[name], window=window)), torch.randint(12, (2, 24))
    whole, cache, parts, sizes = model(x), Cache(2), [], []
    for first, last in ((0, 9), *((i, i + 1) for i in range(9, 20)), (20, 24)):
        parts.append(model(x[:, first:last], cache=cache))
        sizes.append(cache.nbytes)
        assert cache.length == last
    assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=1e-10)
    assert len(set(sizes)) == 1
    held = {cache[0].length - cache[0].gone, cache[1].length - cache[1].gone}
    assert held == {window - 1}


@torch.no_grad()
def test_dropped_keys_free_their_memory():
    """A view would keep the whole tensor; each stored tensor has a storage of its own size."""
    model, cache = make(GROUPED), Cache(2)
    model(torch.randint(12, (1, 30)), cache=cache)
    kept = list(cache[0]._kept.values())
    assert [tuple(tensor.shape) for tensor in kept] == [(1, 3, 2, 4)] * 2
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)


@pytest.mark.parametrize("gap", [False, True])
@torch.no_grad()
def test_padding_in_front_is_dropped_too_but_no_key_behind_a_gap(gap):
    """A row of two tokens and four of padding continues at position 2: a window of 4 contains both."""
    model, x = make(GROUPED), torch.randint(12, (2, 12))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 2 : 6 if gap else 2] = False
    real[1, : 0 if gap else 4] = False
    places = (real.cumsum(1) - 1).clamp(min=0)
    cache, parts = Cache(2), []
    for first, last in ((0, 6), (6, 7), (7, 8), (8, 12)):
        mask = real[:, first:last] if first == 0 else None
        parts.append(model(x[:, first:last], mask=mask, positions=places[:, first:last], cache=cache))
    for row, tokens, here in zip(torch.cat(parts, 1), x, real, strict=True):
        assert_close(row[here], model(tokens[here][None])[0], atol=1e-10, rtol=1e-10)
    assert cache[1].length - cache[1].gone == (12 if gap else 3)
    assert cache[1].real.shape == (2, 12 if gap else 3)


@torch.no_grad()
def test_a_gap_may_come_later():
    """Keys dropped before it are none that matter; after it none is dropped."""
    model, x = make(GROUPED), torch.randint(12, (1, 12))
    real = torch.ones(1, 12, dtype=torch.bool)
    real[0, 5:9] = False
    places, cache, parts = (real.cumsum(1) - 1).clamp(min=0), Cache(2), []
    for first, last in ((0, 5), (5, 9), (9, 10), (10, 12)):
        here = slice(first, last)
        parts.append(model(x[:, here], mask=real[:, here], positions=places[:, here], cache=cache))
    assert_close(torch.cat(parts, 1)[real], model(x[real][None])[0], atol=1e-10, rtol=1e-10)
    assert cache[0].gone == 2
