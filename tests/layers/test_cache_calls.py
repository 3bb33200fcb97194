"""A cache belongs to one layer, and a call adds all its tokens to it or none."""

import copy
import pickle
from unittest import mock

import pytest
import torch
import zoo
from refusals import refused
from torch.testing import assert_close
from zoo import make_layer as make, tokens

import polyhead as ph
from polyhead.layers.cache import Cache, LayerCache

OTHER = r"^MultiHeadAttention: the cache must be this layer's, got that of another layer$"
COPIES = {
    "copied": LayerCache.copied,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.fixture(autouse=True)
def _without_graphs():
    """Only leaves of a graph can be deep copies."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("heads", [[ph.Softmax(4)], [ph.Linear(4)], [ph.Softmax(2), ph.Hyla(2)]], ids=str)
def test_another_layer_is_refused_and_adds_nothing(heads, copied):
    """Also if both are copies of one layer."""
    first = make(heads, causal=True)
    first, second = copy.deepcopy(first), copy.deepcopy(first) if copied else make(heads, causal=True)
    cache, x = LayerCache(), tokens(5)
    y = first(x[:, :3], cache=cache)
    refused(lambda: second(x[:, :3], cache=cache), OTHER)
    y = torch.cat((y, first(x[:, 3:], cache=cache)), 1)
    assert_close(y, first(x), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("method", COPIES)
def test_a_copied_cache_is_a_branch_and_belongs_to_the_layer_that_continues_it(method):
    """Perhaps to that of a model that was built anew; in one process equal weights may as well be another depth."""
    first, second, x = make([ph.Softmax(4)], causal=True), make([ph.Softmax(4)], causal=True), tokens(6)
    cache = LayerCache()
    first(x[:, :3], cache=cache)
    refused(lambda: second(x[:, 3:], cache=cache), OTHER)
    branch = COPIES[method](cache)
    owner, other = (first, second) if method == "copied" else (second, first)
    assert_close(owner(x[:, 3:5], cache=branch), first(x[:, :5])[:, 3:], atol=1e-10, rtol=1e-10)
    refused(lambda: other(x[:, 5:], cache=branch), OTHER)
    assert_close(first(x[:, 3:], cache=cache), first(x)[:, 3:], atol=1e-10, rtol=1e-10)


def test_one_layer_at_two_depths_has_two_caches():
    layer, x, caches = make([ph.Softmax(4)], causal=True), tokens(4), Cache(2)
    for a, b in ((0, 3), (3, 4)):
        y = layer(layer(x[:, a:b], cache=caches[0]), cache=caches[1])
    assert_close(y, layer(layer(x))[:, 3:], atol=1e-10, rtol=1e-10)
    for cache, kind in ((Cache(2), "Cache"), ({}, "dict")):
        with pytest.raises(TypeError, match=rf"^MultiHeadAttention: .* cache\[i\], but is a {kind}$"):
            layer(x, cache=cache)
    with pytest.raises(IndexError, match=r"layer must be below 1, got 1: give Cache\(2\)"):
        Cache(1)[1]


@pytest.mark.compile
def test_compiled_and_plain_calls_share_a_cache():
    torch.compiler.reset()
    layer, x, cache = make([ph.Softmax(4)], causal=True), tokens(4), LayerCache()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    y = torch.cat([(compiled if i % 2 else layer)(x[:, i : i + 1], cache=cache) for i in range(4)], 1)
    assert_close(y, layer(x), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mixture", [*zoo.EVERY][::3])
@pytest.mark.parametrize("module_name", ["groups", "out"])
def test_a_call_that_was_interrupted_adds_nothing(mixture, module_name):
    layer, x, cache = make(zoo.EVERY[mixture], causal=True, positions=ph.Rotary(), window=4), tokens(9), LayerCache()
    positions, bytes_before = torch.arange(9)[None], []
    module = layer.out if module_name == "out" else layer.groups[-1]

    def call(first, last):
        return layer(x[:, first:last], positions=positions[:, first:last], cache=cache)

    pieces = []
    for first, last in ((0, 2), (2, 3), (3, 9)):
        bytes_before.append(cache.nbytes)
        hook = module.register_forward_pre_hook(mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            call(first, last)
        hook.remove()
        assert (cache.length, cache.nbytes) == (first, bytes_before[-1])
        pieces.append(call(first, last))
    assert_close(torch.cat(pieces, 1), layer(x, positions=positions), atol=1e-10, rtol=1e-10)
