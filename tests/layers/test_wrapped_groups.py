"""Wrapped groups of heads: the wrapper is called, and no other code is returned; hooks and assigned `forward`s."""

import functools

import pytest
import torch
import zoo
from adapters import adapted
from refusals import refused
from torch import nn
from torch.testing import assert_close

import polyhead as ph
from polyhead import config
from polyhead.layers.cache import LayerCache
from polyhead.layers.heads.functions import coder
from polyhead.layers.projection import affine
from polyhead.ops.call import AttentionCall

F64 = torch.float64
MECHANISMS = [mechanism for kind in zoo.KINDS for mechanism in zoo.variants(kind)[::8]]


class Through(nn.Module):
    """Passes on calls, but no attributes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Doubled(Through):
    """Passes on all attributes, but doubles the output."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return 2 * self.inner(*args, **kwargs)


def layer(mechanism):
    torch.manual_seed(0)
    return ph.MultiHeadAttention(24, [mechanism, ph.Softmax(2)], causal=True, dtype=F64).eval()


def inputs(*lengths):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(2, n, 24, generator=draw, dtype=F64) for n in lengths]


def same(attention, want, group):
    """Outputs and gradients of a layer whose first group wraps `group` are those of `want`, with other parameters."""
    (x,), outputs = inputs(6), []
    for parameter, own in zip(group.parameters(), want.groups[0].parameters(), strict=True):
        nn.init.normal_(own, std=0.4)
        parameter.data.copy_(own)
    for each in (attention, want):
        cache = LayerCache()
        outputs.append([each(x), each(x[:, :4], cache=cache), each(x[:, 4:], cache=cache)])
        each(x).square().sum().backward()
    assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for parameter, own in zip(group.parameters(), want.groups[0].parameters(), strict=True):
        assert_close(parameter.grad, own.grad)


def refuses_its_code(attention, who):
    (x,), taps = inputs(6), []
    line = rf"^{who}: the code of forward is not known: give it with the function, group\.use\(forward, code=\.\.\.\)$"
    attention(x, taps=taps)
    for ask in (lambda: attention(x, return_code=True), taps[0].groups[0].code):
        refused(ask, line)
    assert [group.kind for group in taps[0].groups] == ["own", "softmax"]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_compiled_group_computes_the_same(mechanism, eager):
    attention, want = layer(mechanism), layer(mechanism)
    attention.groups[0] = eager(attention.groups[0])
    same(attention, want, attention.groups[0])
    (x,), mine, own = inputs(6), [], []
    assert_close(attention(x, return_code=True, taps=mine), want(x, return_code=True, taps=own))
    mine, own = mine[0].groups[0], own[0].groups[0]
    for name in ("kind", "normalise", "act", "depth", "relation_act"):
        assert getattr(mine, name) == getattr(own, name)
    assert_close(mine.code(), own.code())


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_group_in_a_wrapper_is_used_and_trained(mechanism):
    """In one of PEFT, and in one that passes on calls only, which relational heads cannot use."""
    attention, want = layer(mechanism), layer(mechanism)
    attention = adapted(attention, fill=False, target_modules=["out"], modules_to_save=["groups.0"]).base_model.model
    same(attention, want, attention.groups[0].modules_to_save["default"])
    refuses_its_code(attention, "ModulesToSaveWrapper")
    attention, want, (x,) = layer(mechanism), layer(mechanism), inputs(6)
    attention.groups[0] = Through(attention.groups[0])
    if isinstance(mechanism, config.SymbolHeads):
        line = "^Through: relational heads must have a method features, wrapped ones as well$"
        refused(lambda: attention(x), line)
    else:
        same(attention, want, attention.groups[0])
        refuses_its_code(attention, "Through")


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_wrapper_that_computes_something_else_is_shown_as_such(mechanism, eager):
    for wrap in (Doubled, lambda group: Doubled(eager(group)), lambda group: eager(Doubled(group))):
        attention, want, (x,) = layer(mechanism), layer(mechanism), inputs(6)
        attention.groups[0] = wrap(attention.groups[0])
        with torch.no_grad():
            want.out.weight[:, :12] *= 2
        assert_close(attention(x), want(x))
        refuses_its_code(attention, "Doubled")


def test_the_sum_that_linear_heads_kept_is_lost_on_no_wrapper(eager):
    attention, (x,) = layer(ph.Linear(2)), inputs(6)
    whole, linear = attention(x), attention.groups[0]
    for wrap in (eager, Through):
        cache = LayerCache()
        attention.groups[0] = linear
        attention(x[:, :3], cache=cache)
        attention.groups[0] = wrap(linear)
        call = functools.partial(attention, x[:, 3:], cache=cache)
        if wrap is eager:
            assert_close(call(), whole[:, 3:])
        else:
            refused(call, "linear heads kept the sum of earlier tokens, but a Through came$")


def test_a_partial_with_other_options_is_a_users_function():
    heads = ph.MultiHeadAttention(8, ph.Softmax(2, impl="reference")).groups[0]
    call = AttentionCall(*torch.randn(3, 1, 3, 2, 4))
    heads.attend = functools.partial(heads.attend.func, **heads.attend.keywords)  # nothing else is computed
    assert coder(heads)(call).shape == (1, 2, 3, 3)
    heads.attend = functools.partial(heads.attend.func, impl="sdpa")
    refused(lambda: coder(heads), "is not known")


# ------------------------------------------------------------------------------------------------------------- hooks
def test_a_forward_that_was_assigned_to_a_map_counts():
    """As accelerate gives one."""
    part = nn.Linear(4, 3)
    part.forward = lambda x, before=part.forward: 2 * before(x)
    assert_close(affine(part)[0], 2 * part.weight)


@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_of_linear_heads_are_called_with_a_cache(wrapped):
    layer, cache = ph.MultiHeadAttention(16, ph.Linear(2), causal=True), LayerCache()
    if wrapped:
        layer.groups[0] = torch.compile(layer.groups[0])
    layer.groups[0].register_forward_hook(lambda group, given, y: 0 * y)
    x = torch.randn(1, 4, 16)
    with torch.compiler.set_stance("force_eager"):
        y = [layer(x[:, i : i + 1], cache=cache) for i in range(4)]
        assert not layer(x).any()
    assert not torch.cat(y, 1).any()
