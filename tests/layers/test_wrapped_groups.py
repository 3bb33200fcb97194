"""A wrapped group of heads: the wrapper is called, and no other code is returned."""

import copy
import functools
import re
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat import torch_mha
from polyhead.layers.cache import LayerCache
from polyhead.layers.heads import functions

F64 = torch.float64
MECHANISMS = {
    "softmax": ph.Softmax(2),
    "linear": ph.Linear(2),
    "hyla": ph.Hyla(2, value_depth=2),
    "relational": ph.Relational(2, symbols=ph.SymbolicAttention(5)),
    "hidden": ph.Relational(2, hidden=5, symmetric=True, symbols=ph.RelativeSymbols(3)),
    "disentangled": ph.Disentangled(2),
    "abstractor": ph.Abstractor(2, hidden=5),
}
RELATIONAL = ("relational", "hidden", "disentangled", "abstractor")


class Through(nn.Module):
    """Hands on what it is called with, and nothing else."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Doubled(Through):
    """Says all that its inner module says, but computes twice as much."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return 2 * self.inner(*args, **kwargs)


@pytest.fixture
def eager():
    """What torch.compile makes of a module, but not of its code."""
    with torch.compiler.set_stance("force_eager"):
        yield torch.compile


def layer(name, **options):
    torch.manual_seed(0)
    return ph.MultiHeadAttention(24, [MECHANISMS[name], ph.Softmax(2)], causal=True, dtype=F64, **options).eval()


def inputs(*lengths):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(2, n, 24, generator=draw, dtype=F64) for n in lengths]


def filled(group, std=0.4):
    """Other parameters, so that one sees whose are read."""
    torch.manual_seed(2)
    for parameter in group.parameters():
        nn.init.normal_(parameter, std=std)


def passes(attention, x, context, keep):
    """The output in each way of calling a layer."""
    cache = LayerCache()
    return [
        attention(x),
        attention(x, context),
        attention(x, keep=keep),
        torch.cat([attention(x[:, :4], cache=cache), attention(x[:, 4:], cache=cache)], 1),
    ]


def same(attention, want):
    x, context = inputs(6, 9)
    keep = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(3), dtype=F64).round() * 2
    for mine, own in zip(passes(attention, x, context, keep), passes(want, x, context, keep), strict=True):
        assert_close(mine, own, rtol=1e-12, atol=1e-12)
    attention(x).square().sum().backward()
    want(x).square().sum().backward()


def refuses_its_code(attention, who):
    (x,), taps = inputs(6), []
    line = rf"^{who}: the code of forward is not known: give it with the function, group\.use\(forward, code=\.\.\.\)$"
    attention(x, taps=taps)
    for ask in (lambda: attention(x, return_code=True), taps[0].groups[0].code):
        with pytest.raises(ValueError, match=line):
            ask()
    assert taps[0].groups[0].kind == "own"
    assert not taps[0].groups[0].relates
    assert taps[0].groups[1].kind == "softmax"


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_compiled_group_is_what_it_was(name, eager):
    attention, want = layer(name), layer(name)
    attention.groups[0] = eager(attention.groups[0])
    filled(attention.groups[0])
    filled(want.groups[0])
    same(attention, want)
    for mine, own in zip(attention.groups.parameters(), want.groups.parameters(), strict=True):
        assert_close(mine.grad, own.grad)
    (x,), mine, own = inputs(6), [], []
    assert_close(attention(x, return_code=True, taps=mine), want(x, return_code=True, taps=own))
    a, b = mine[0].groups[0], own[0].groups[0]
    assert (a.kind, a.normalise, a.act, a.depth, a.relation_act) == (
        b.kind,
        b.normalise,
        b.act,
        b.depth,
        b.relation_act,
    )
    assert_close(a.code(), b.code())
    assert a.relates == b.relates
    if a.relates:
        assert_close((a.relations(), a.relation_weight), (b.relations(), b.relation_weight))


def test_a_compiled_group_with_a_function_of_the_users(eager):
    """Its code is still not known, and its dropout still tried."""
    attention, (x,) = layer("softmax"), inputs(6)
    attention.groups[0].attend = lambda q, k, v, **seen: v
    attention.groups[0] = eager(attention.groups[0])
    assert functions.is_own(attention.groups[0])
    with pytest.raises(ValueError, match=r"^SoftmaxHeads: the code of <lambda> is not known"):
        attention(x, return_code=True)
    with pytest.raises(ValueError, match=r"^SoftmaxHeads: <lambda> must multiply its code by keep"):
        attention(x, keep=torch.ones(1, 1, 6, 6, dtype=F64))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_group_of_pefts_is_used_and_trained(name):
    import peft

    attention, want = layer(name), layer(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it saves
        lora = peft.LoraConfig(target_modules=["out"], modules_to_save=["groups.0"])
        attention = peft.get_peft_model(attention, lora).base_model.model
    ours = attention.groups[0].modules_to_save["default"]
    filled(ours)
    filled(want.groups[0])
    same(attention, want)
    grads = zip(ours.parameters(), want.groups[0].parameters(), strict=True)
    assert all(mine.grad is not None and torch.allclose(mine.grad, own.grad) for mine, own in grads)
    refuses_its_code(attention, "ModulesToSaveWrapper")


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_group_that_is_only_passed_through(name):
    attention, want, (x,) = layer(name), layer(name), inputs(6)
    attention.groups[0] = Through(attention.groups[0])
    if name in RELATIONAL:
        line = "^Through: relational heads must have a method features, wrapped ones as well$"
        with pytest.raises(ValueError, match=line):
            attention(x)
    else:
        same(attention, want)
        refuses_its_code(attention, "Through")


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_wrapper_that_computes_something_else_is_shown_as_such(name, eager):
    for wrap in (Doubled, lambda group: Doubled(eager(group)), lambda group: eager(Doubled(group))):
        attention, want, (x,) = layer(name), layer(name), inputs(6)
        attention.groups[0] = wrap(attention.groups[0])
        with torch.no_grad():
            want.out.weight[:, :12] *= 2
        assert_close(attention(x), want(x))
        refuses_its_code(attention, "Doubled")


@pytest.mark.parametrize("name", ["hyla", "relational", "abstractor"])
def test_in_the_place_of_torchs_attention(name, eager):
    heads = [copy.copy(MECHANISMS[name]), ph.Softmax(2)]
    if name == "abstractor":
        heads[0] = ph.Abstractor(2)
    torch.manual_seed(0)
    attention, (x,) = torch_mha.MultiheadAttention(24, 4, batch_first=True, dtype=F64, heads=heads).eval(), inputs(6)
    want, code = attention(x, x, x, average_attn_weights=False)
    inner = attention.groups[0]
    attention.groups[0] = eager(inner)
    assert_close(attention(x, x, x, average_attn_weights=False), (want, code))
    (taps,) = torch_mha.capture(attention, x, x, x)
    assert_close(taps.groups[0].code(), code[:, :2])
    attention.groups[0] = Through(inner)
    if name == "hyla":
        assert_close(attention(x, x, x, need_weights=False)[0], want)
    with pytest.raises(ValueError, match=re.escape("Through: ")):
        attention(x, x, x)


def test_the_sum_that_linear_heads_kept_is_lost_on_no_wrapper(eager):
    attention, (x,) = layer("linear"), inputs(6)
    whole, linear = attention(x), attention.groups[0]
    for wrap in (eager, Through):
        cache = LayerCache()
        attention.groups[0] = linear
        attention(x[:, :3], cache=cache)
        attention.groups[0] = wrap(linear)
        if wrap is eager:
            assert_close(attention(x[:, 3:], cache=cache), whole[:, 3:])
        else:
            with pytest.raises(ValueError, match=r"linear heads kept the sum of earlier tokens, but a Through came$"):
                attention(x[:, 3:], cache=cache)


def test_a_partial_of_the_same_op_with_other_options_is_a_function_of_ones_own():
    heads = ph.MultiHeadAttention(8, ph.Softmax(2, impl="reference")).groups[0]
    heads.attend = functools.partial(heads.attend.func, **heads.attend.keywords)  # nothing else is computed
    heads.code(*torch.randn(2, 1, 3, 2, 4))
    heads.attend = functools.partial(heads.attend.func, impl="sdpa")
    with pytest.raises(ValueError, match="is not known"):
        heads.code(*torch.randn(2, 1, 3, 2, 4))
