"""Heads whose values are symbols: biases, sources of symbols, autocast, errors; widths and initial values."""

import re

import pytest
import torch
from refusals import refused
from torch.testing import assert_close
from zoo import make_layer as make, tokens

import polyhead as ph
from polyhead.layers.heads.groups import build
from polyhead.models.initialise import initialise

DUAL = [ph.Softmax(2), ph.Relational(2)]


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


def relations_of(heads, x):
    taps = []
    make(heads)(x, taps=taps)
    return taps[0].groups[0].relations()


def dual(x, symbols):
    return make(DUAL)(x, symbols=symbols)


MISTAKES = {
    "symbols must be (b|1 s m) = (2, 5, 48) or, if relative, a table": lambda x: dual(x, x[:, :4]),
    "but are (4, 5, 48)": lambda x: dual(x, x.repeat(2, 1, 1)),
    "but are (5, 7)": lambda x: dual(x, x[0, :, :7]),
    "2 distance + 1 rows, an odd number, not 4": lambda x: dual(x, x[0, :4]),
    "must have x's dtype, torch.float64, but are torch.int64": lambda x: dual(x, x.long()),
    "one tensor or one (or None) a group: 2, not 1": lambda x: dual(x, [x]),
    "group 1 takes symbols, of width 48, but there are none": lambda x: dual(x, [x, None]),
    "own_symbols=False its relational heads need symbols=": lambda x: make(DUAL, own_symbols=False)(x),
    "2 heads, dim 24 and kv_heads 2 but there is none": lambda x: make([ph.Relational(2, share=True)]),
    "but it has 2, 12 and 1": lambda x: make([ph.Softmax(2, kv_heads=1), ph.Relational(2, share=True)]),
    "need kv_heads = heads = 4 but it is 2": lambda x: make([ph.Disentangled(4, kv_heads=2, symmetric=True)]),
    "abstractor heads have no relations beside their code": lambda x: relations_of([ph.Abstractor(4)], x),
    "48: give dim= and value_dim= (per head)": lambda x: make([ph.Softmax(2), ph.Relational(3)]),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line):
    refused(lambda: MISTAKES[line](tokens(5)), re.escape(line))


@pytest.mark.compile  # without annotation checks, as users have it
def test_symbols_that_are_no_tensor():
    layer, x = make(DUAL), tokens(5)
    refused(lambda: layer(x, symbols=x.numpy()), "symbols must be a Tensor, or a list of one .* but are a ndarray$")
    refused(lambda: layer(x, symbols=[None, x.numpy()]), "symbols of group 1 must be a Tensor but are a ndarray$")


def test_relations_are_together_as_wide_as_the_values():
    """As many relations as heads, together as wide as the heads' values; too many are one wide."""
    for relations, expected in ((None, 6), (2, 12), (5, 4), (24, 1), (50, 1)):
        assert build(ph.Relational(4, 8, 6, relations=relations), 16, 4).relation_dim == expected
    assert build(ph.Disentangled(4, 8, 6), 16, 4).relation_dim == 6


def shares(layer, x):
    """What relations and symbols contribute to a layer's second group of heads; what its first group returns."""
    taps: list = []
    with torch.no_grad():
        layer(x, taps=taps)
        first, group = taps[0].groups
        relations = torch.einsum("her,bhts,brts->bthe", group.relation_weight, group.code(), group.relations())
    return relations, group.output - relations, first.output


OPTIONS = [
    {},
    {"relations": 3, "relation_dim": 40},
    {"symmetric": True, "hidden": 48},
    {"relation_act": "tanh", "kv_heads": 2},
    {"symbols": ph.RelativeSymbols()},
]


@pytest.mark.parametrize("preset", [None, "hyla", "cs336"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_relations_and_symbols_begin_alike(preset, options):
    """Of one standard deviation to a factor of two, however the maps around them are initialised.

    Relative symbols, and so their relations, begin far below the values of other heads.
    """
    layer = ph.MultiHeadAttention(64, [ph.Softmax(4), ph.Relational(4, **{"symbols": ph.PositionSymbols(), **options})])
    if preset is not None:
        initialise(layer, preset)
    relations, symbols, values = shares(layer, torch.randn(8, 32, 64))
    assert 0.5 < relations.std() / symbols.std() < 2
    assert 0.4 < relations.std() / values.std() < 2.5 or "symbols" in options


def test_relation_weights_of_the_paper_and_of_the_package():
    for name, bound in (("paper", 8**-0.5), ("package", (16 * 8) ** -0.5)):
        group = build(ph.Relational(4, relations=8, relation_init=name), 64, 4)
        weight = group.relation_weight
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        weight.data.fill_(7.0)
        initialise(torch.nn.Sequential(group), "hyla")
        assert weight.abs().max() <= bound
