"""Hooks, and a `forward` that was assigned to a layer, are called wherever the layer is used."""

import pytest
import torch
from refusals import refused
from torch import nn
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import LayerCache
from polyhead.layers.projection import affine, plain

F64 = torch.float64


def assigned(layer):
    """The layer with another `forward`, as accelerate gives one; it doubles the output."""
    before = layer.forward
    layer.forward = lambda x: 2 * before(x)
    return layer


def test_a_forward_that_was_assigned_to_the_projection_is_called_in_cross_attention():
    torch.manual_seed(0)
    layer, x = ph.MultiHeadAttention(16, ph.Linear(2), dtype=F64).eval(), torch.randn(2, 5, 16, dtype=F64)
    before = layer(x)
    assigned(layer.qkv)
    assert_close(layer(x), 8 * before)
    assert_close(layer(x, x.clone()), 8 * before)
    taps = []
    layer(x, taps=taps)
    assert_close(taps[0].groups[0].w_value.flatten(0, 1), 2 * layer.qkv.weight[-16:])


def test_a_forward_that_was_assigned_to_a_feedforward_map_is_called():
    torch.manual_seed(0)
    layer, x = ph.MlpLayer(64, act="gelu_tanh"), torch.randn(64, 32, 64)
    before = nn.functional.gelu(2 * layer.up(x), approximate="tanh")
    assigned(layer.up)
    assert_close(layer(x), layer.down(before))
    assert_close(affine(layer.up)[0], 2 * layer.up.weight)


def with_a_forward_hook(group):
    group.register_forward_hook(lambda group, given, y: 0 * y)


def with_a_pre_hook(group):
    group.register_forward_pre_hook(lambda group, args, given: (args, {**given, "q": 0 * given["q"]}), with_kwargs=True)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("hook", [with_a_forward_hook, with_a_pre_hook])
def test_hooks_of_linear_heads_are_called_with_a_cache(hook, wrapped):
    layer, cache = ph.MultiHeadAttention(16, ph.Linear(2), causal=True), LayerCache()
    if wrapped:
        layer.groups[0] = torch.compile(layer.groups[0])
    hook(layer.groups[0])
    x = torch.randn(1, 4, 16)
    with torch.compiler.set_stance("force_eager"):
        y = [layer(x[:, i : i + 1], cache=cache) for i in range(4)]
        assert not layer(x).any()
    assert not torch.cat(y, 1).any()


def test_a_hook_cannot_come_after_a_sum_was_kept():
    layer, cache = ph.MultiHeadAttention(16, ph.Linear(2), causal=True), LayerCache()
    x = torch.randn(1, 1, 16)
    layer(x, cache=cache)
    with_a_forward_hook(layer.groups[0])
    refused(lambda: layer(x, cache=cache), r"^LinearHeads: step needs heads .* earlier tokens, but it has hooks$")


@pytest.mark.compile
@pytest.mark.parametrize("change", [lambda layer: layer, assigned])
def test_a_compiled_graph_sees_the_same(change):
    torch.compiler.reset()
    layer = change(nn.Linear(3, 3))
    told = torch.compile(lambda x: x + plain(layer), backend="eager", fullgraph=True)
    assert told(torch.zeros(1)).item() == plain(layer) == (change is not assigned)
