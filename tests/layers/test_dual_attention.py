"""Relational heads in a layer: positions and biases, symbols from everywhere, autocast, errors."""

import functools
import re

import pytest
import torch
from refusals import refused
from some import some
from torch.testing import assert_close
from zoo import make_layer as make

import polyhead as ph

F64 = torch.float64
M = 48
DUAL = [ph.Softmax(2), ph.Relational(2)]


def tokens(t, b=2):
    return torch.randn(b, t, M, dtype=F64)


def test_rotary_turns_attention_and_not_relations():
    layer, x = make(DUAL, positions=ph.Rotary()), tokens(5)
    seen = [[], []]
    for i, where in enumerate((torch.arange(5), torch.arange(5) * 3)):
        layer(x, positions=where[None], taps=seen[i])
    near, far = (taps[0].groups[1] for taps in seen)
    assert_close(near.relations(), far.relations(), atol=0, rtol=0)
    assert not torch.allclose(near.code(), far.code())


def test_a_bias_is_of_the_scores_and_not_of_relations():
    heads = [ph.Relational(2, relation_act="softmax"), ph.Disentangled(2, relation_act="softmax")]
    layer, x, taps = make(heads, positions=ph.RelativeBias()), tokens(5), []
    layer(x, taps=taps)
    layer(x, bias=torch.randn(1, 4, 5, 5, dtype=F64), taps=taps)
    for before, after in some(zip(taps[0].groups, taps[1].groups, strict=True)):
        assert_close(before.relations(), after.relations(), atol=0, rtol=0)
        assert not torch.allclose(before.code(), after.code())
        assert not torch.allclose(before.output, after.output)


# --------------------------------------------------------------------------------------------------------- symbols
def test_a_table_of_relative_symbols_is_a_symbol_for_each_pair():
    """Beside one query at a time, with the symbols of its own keys; offsets beyond the table are clipped."""
    heads = [ph.Softmax(2), ph.Relational(2, kv_heads=1), ph.Disentangled(2)]
    single, x, table = make(heads, own_symbols=False), tokens(6), torch.randn(5, M, dtype=F64)
    for causal, t, first in ((False, 6, 0), (True, 6, 0), (True, 2, 4), (False, 2, 3)):
        layer, queries, rows = make(heads, causal=causal, own_symbols=False), x[:, 6 - t :], []
        for i in range(t):
            symbols = table[(torch.arange(6) - first - i).clamp(-2, 2) + 2][None]
            mask = torch.arange(6) <= 6 - t + i if causal else None
            rows.append(single(queries[:, i : i + 1], x, symbols=symbols, mask=mask))
        assert_close(layer(queries, x, symbols=table, first=first), torch.cat(rows, 1))


def test_relative_symbols_count_tokens():
    """Causal: the last query is the last key; else query 0 is key 0, unless the caller says where it is."""
    heads = [ph.Relational(4, symbols=ph.RelativeSymbols(distance=3))]
    x = tokens(6)
    causal, both = make(heads, causal=True), make(heads)
    assert_close(causal(x[:, -2:], x), causal(x)[:, -2:])
    assert_close(both(x[:, :2], x), both(x)[:, :2])
    assert_close(both(x[:, -2:], x, first=4), both(x)[:, -2:])
    assert_close(both(x, positions=torch.arange(6)[None] * 2), both(x))


def test_own_sources_are_those_that_groups_name():
    other = ph.Relational(2, symbols=ph.SymbolicAttention())
    heads = [ph.Relational(2), other, ph.Disentangled(2), ph.Softmax(2)]
    layer, bare, x = make(heads), make(heads, own_symbols=False), tokens(5)
    assert [type(source).__name__ for source in layer.symbols] == ["PositionSymbols", "SymbolicAttention"]
    assert not any("symbols" in name for name in bare.state_dict())
    bare.load_state_dict({name: a for name, a in layer.state_dict().items() if not name.startswith("symbols")})
    first, second = (source(x) for source in layer.symbols)
    assert_close(bare(x, symbols=[first, second, first, None]), layer(x))


def test_symbols_of_cross_attention_are_those_of_the_senders():
    layer = make([ph.Softmax(2), ph.Relational(2, symbols=ph.RelationalSymbols())])
    x, context = tokens(3), tokens(5)
    assert_close(layer(x, context), layer(x, context, symbols=layer.symbols[0](context)))
    one = tokens(5, b=1)
    assert_close(layer(x, context, symbols=one), layer(x, context, symbols=one.expand(2, -1, -1)))


ERRORS = {
    "symbols of the wrong length": (
        lambda a, x: a(x, symbols=x[:, :4]),
        "symbols must be (b|1 s m) = (2, 5, 48) or, if relative, a table (2 distance + 1, m) but are (2, 4, 48)",
    ),
    "symbols of the wrong width": (lambda a, x: a(x, symbols=x[..., :7]), "but are (2, 5, 7)"),
    "symbols of another batch": (lambda a, x: a(x, symbols=x.repeat(2, 1, 1)), "but are (4, 5, 48)"),
    "a symbol for each pair": (lambda a, x: a(x, symbols=torch.zeros(5, 5, M, dtype=F64)), "but are (5, 5, 48)"),
    "an even table": (lambda a, x: a(x, symbols=x[0, :4]), "2 distance + 1 rows, an odd number, not 4"),
    "integers": (lambda a, x: a(x, symbols=x.long()), "must have x's dtype, torch.float64, but are torch.int64"),
    "another dtype": (lambda a, x: a(x, symbols=[None, x.float()]), "torch.float64, but are torch.float32"),
    "too few": (lambda a, x: a(x, symbols=[x]), "one tensor or one (or None) a group: 2, not 1"),
    "none for a group": (
        lambda a, x: a(x, symbols=[x, None]),
        "group 1 takes symbols, of width 48, but there are none",
    ),
    "no source": (
        lambda a, x: make(DUAL, own_symbols=False)(x),
        "own_symbols=False its relational heads need symbols=",
    ),
    "shared with none": (
        lambda a, x: make([ph.Relational(2, share=True)]),
        "Relational(share=True) needs a group before it of 2 heads, dim 24 and kv_heads 2 but there is none",
    ),
    "shared with others": (
        lambda a, x: make([ph.Softmax(4, dim=6), ph.Relational(2, dim=6, share=True)]),
        "Relational(share=True) needs a group before it of 2 heads, dim 6 and kv_heads 2 but it has 4, 6 and 4",
    ),
    "shared with other groups of keys": (
        lambda a, x: make([ph.Softmax(2, kv_heads=1), ph.Relational(2, share=True)]),
        "dim 12 and kv_heads 2 but it has 2, 12 and 1",
    ),
    "heads that do not fill the width": (
        lambda a, x: make([ph.Softmax(2), ph.Relational(3)]),
        "Softmax: 5 heads in all (2 of them here) do not divide the model width 48: give dim= and value_dim=",
    ),
    "heads of which one width is given": (
        lambda a, x: make([ph.Softmax(2, dim=8, value_dim=8), ph.Relational(3, dim=8)]),
        "Relational: 5 heads in all (3 of them here) do not divide the model width 48: give value_dim= (per head)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_are_one_line(name):
    call, text = ERRORS[name]
    refused(lambda: call(make(DUAL), tokens(5)), re.escape(text))


@pytest.mark.compile  # without annotation checks, as users have it
def test_symbols_that_are_no_tensor():
    layer, x = make(DUAL), tokens(5)
    for symbols, text in (
        (x.numpy(), "must be a Tensor, or a list of one (or None) a group, but are a ndarray"),
        ([None, x.numpy()], "of group 1 must be a Tensor but are a ndarray"),
        (ph.PositionSymbols(), "but are a PositionSymbols"),
    ):
        call = functools.partial(layer, x, symbols=symbols)
        refused(call, rf"^MultiHeadAttention: symbols .*{re.escape(text)}$")


def test_given_symbols_may_have_the_dtype_of_autocast():
    layer, x = make(DUAL).float(), torch.randn(2, 5, M)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(layer(x, symbols=x.bfloat16()), layer(x, symbols=x))
