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


class Passthrough(nn.Module):
    """Passes on calls, but no attributes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Doubled(Passthrough):
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


def check_same(attention, reference, group):
    """Outputs and gradients of a layer whose first group wraps `group` are those of `reference`."""
    (x,), outputs = inputs(6), []
    for parameter, expected in zip(group.parameters(), reference.groups[0].parameters(), strict=True):
        nn.init.normal_(expected, std=0.4)
        parameter.data.copy_(expected)
    for module in (attention, reference):
        cache = LayerCache()
        outputs.append([module(x), module(x[:, :4], cache=cache), module(x[:, 4:], cache=cache)])
        module(x).square().sum().backward()
    assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for parameter, expected in zip(group.parameters(), reference.groups[0].parameters(), strict=True):
        assert_close(parameter.grad, expected.grad)


def check_code_is_refused(attention, name):
    (x,), taps = inputs(6), []
    message = rf"^{name}: the code of forward is not known: give it with the function"
    message += r", group\.use\(forward, code=\.\.\.\)$"
    attention(x, taps=taps)
    for call in (lambda: attention(x, return_code=True), taps[0].groups[0].code):
        refused(call, message)
    assert [group.kind for group in taps[0].groups] == ["own", "softmax"]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_compiled_group_computes_the_same(mechanism, eager):
    attention, reference = layer(mechanism), layer(mechanism)
    attention.groups[0] = eager(attention.groups[0])
    check_same(attention, reference, attention.groups[0])
    (x,), taps, expected_taps = inputs(6), [], []
    assert_close(attention(x, return_code=True, taps=taps), reference(x, return_code=True, taps=expected_taps))
    group, expected = taps[0].groups[0], expected_taps[0].groups[0]
    for name in ("kind", "normalise", "act", "depth", "relation_act"):
        assert getattr(group, name) == getattr(expected, name)
    assert_close(group.code(), expected.code())


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_group_in_a_wrapper_is_used_and_trained(mechanism):
    """In one of PEFT, and in one that passes on calls only, which relational heads cannot use."""
    attention, reference = layer(mechanism), layer(mechanism)
    attention = adapted(attention, fill=False, target_modules=["out"], modules_to_save=["groups.0"]).base_model.model
    check_same(attention, reference, attention.groups[0].modules_to_save["default"])
    check_code_is_refused(attention, "ModulesToSaveWrapper")
    attention, reference, (x,) = layer(mechanism), layer(mechanism), inputs(6)
    attention.groups[0] = Passthrough(attention.groups[0])
    if isinstance(mechanism, config.SymbolHeads):
        message = "^Passthrough: relational heads must have a method features, wrapped ones as well$"
        refused(lambda: attention(x), message)
    else:
        check_same(attention, reference, attention.groups[0])
        check_code_is_refused(attention, "Passthrough")


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_wrapper_that_computes_something_else_is_shown_as_such(mechanism, eager):
    for wrap in (Doubled, lambda group: Doubled(eager(group)), lambda group: eager(Doubled(group))):
        attention, reference, (x,) = layer(mechanism), layer(mechanism), inputs(6)
        attention.groups[0] = wrap(attention.groups[0])
        with torch.no_grad():
            reference.out.weight[:, :12] *= 2
        assert_close(attention(x), reference(x))
        check_code_is_refused(attention, "Doubled")


def test_the_sum_that_linear_heads_kept_is_lost_on_no_wrapper(eager):
    attention, (x,) = layer(ph.Linear(2)), inputs(6)
    expected, linear = attention(x), attention.groups[0]
    for wrap in (eager, Passthrough):
        cache = LayerCache()
        attention.groups[0] = linear
        attention(x[:, :3], cache=cache)
        attention.groups[0] = wrap(linear)
        call = functools.partial(attention, x[:, 3:], cache=cache)
        if wrap is eager:
            assert_close(call(), expected[:, 3:])
        else:
            refused(call, "linear heads kept the sum of earlier tokens, got a Passthrough$")


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
    linear = nn.Linear(4, 3)
    linear.forward = lambda x, forward=linear.forward: 2 * forward(x)
    assert_close(affine(linear, linear.in_features)[0], 2 * linear.weight)


@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_of_linear_heads_are_called_with_a_cache(wrapped):
    layer, cache = ph.MultiHeadAttention(16, ph.Linear(2), causal=True), LayerCache()
    if wrapped:
        layer.groups[0] = torch.compile(layer.groups[0])
    layer.groups[0].register_forward_hook(lambda group, args, y: 0 * y)
    x = torch.randn(1, 4, 16)
    with torch.compiler.set_stance("force_eager"):
        y = [layer(x[:, i : i + 1], cache=cache) for i in range(4)]
        assert not layer(x).any()
    assert not torch.cat(y, 1).any()
