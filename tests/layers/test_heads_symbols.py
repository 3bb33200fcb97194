"""Head groups whose values are symbols: widths, initial values, positions that are given."""

import pytest
import torch
from refusals import refused
from torch.testing import assert_close

import polyhead as ph
from polyhead.config.sizes import Sizes
from polyhead.layers.heads.symbolic import AbstractorHeads, DisentangledHeads, RelationalHeads
from polyhead.models.initialise import initialise


def test_heads_without_relations_say_so():
    taps: list = []
    ph.MultiHeadAttention(16, ph.Abstractor(4))(torch.randn(1, 4, 16), taps=taps)
    refused(lambda: taps[0].groups[0].relations(), "abstractor heads have no relations beside their code")


def test_default_sizes():
    """As many relations as heads, together as wide as the heads' values; too many are one wide."""
    size = Sizes(4, 8, 6, 4)
    for relations, wanted in ((None, 6), (2, 12), (5, 4), (24, 1), (50, 1)):
        assert RelationalHeads(16, size, relations=relations).relation_dim == wanted
    assert RelationalHeads(16, size, relations=3, relation_dim=9).q_rel.weight.shape == (27, 16)
    assert DisentangledHeads(16, size).relation_dim == 6
    assert AbstractorHeads(16, size, symbol_dim=5).value.weight.shape == (24, 5)


def shares(layer, *given, **named):
    """What relations and symbols contribute to a layer's second group of heads; what its first group returns."""
    taps: list = []
    with torch.no_grad():
        layer(*given, **named, taps=taps)
        first, group = taps[0].groups
        relations = torch.einsum("her,bhts,brts->bthe", group.relation_weight, group.code(), group.relations())
    return relations, group.output - relations, first.output


OPTIONS = [
    {},
    {"relations": 2},
    {"relations": 32},
    {"relations": 3, "relation_dim": 40},
    {"symmetric": True},
    {"hidden": 48},
    {"relation_act": "tanh"},
    {"kv_heads": 2},
]


@pytest.mark.parametrize("preset", [None, "hyla", "cs336"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_relations_and_symbols_begin_alike(preset, options):
    """Of one standard deviation to a factor of two, however the maps around them are initialised."""
    torch.manual_seed(0)
    layer = ph.MultiHeadAttention(64, [ph.Softmax(4), ph.Relational(4, symbols=ph.PositionSymbols(), **options)])
    if preset is not None:
        initialise(layer, preset)
    relations, symbols, values = shares(layer, torch.randn(8, 32, 64), symbols=torch.randn(8, 32, 64))
    assert 0.5 < relations.std() / symbols.std() < 2
    assert 0.4 < relations.std() / values.std() < 2.5


@pytest.mark.parametrize("length", [16, 512])
@pytest.mark.parametrize(
    "source", [ph.PositionSymbols(), ph.RelativeSymbols(), ph.SymbolicAttention(), ph.RelationalSymbols()]
)
def test_relations_balance_the_symbols_of_every_source(source, length):
    """Relative symbols begin far below 1, others near it; in a layer and as a model initialises them.

    Mixtures of a library vary less than N(0, 1), which is not measured: there the ratio is 2 to 4.
    """
    torch.manual_seed(0)
    layer = ph.MultiHeadAttention(64, [ph.Softmax(4), ph.Relational(4, symbols=source)], max_length=length)
    for preset in (None, "hyla"):
        if preset is not None:
            initialise(layer, preset)
        relations, symbols, _ = shares(layer, torch.randn(8, 16, 64))
        assert 0.4 < relations.std() / symbols.std() < 5


def test_relation_weights_of_the_paper_and_of_the_package():
    size = Sizes(4, 16, 16, 4)
    for name, bound in (("paper", 8**-0.5), ("package", (16 * 8) ** -0.5)):
        weight = RelationalHeads(64, size, relations=8, relation_init=name).relation_weight
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        initialise(layer := torch.nn.Sequential(RelationalHeads(64, size, relations=8, relation_init=name)), "hyla")
        assert layer[0].relation_weight.abs().max() <= bound


@pytest.mark.parametrize(
    "source", [ph.RelativeSymbols(), ph.RelativeSymbols(distance=40, dim=24), ph.PositionSymbols()]
)
def test_symbols_begin_with_the_spread_that_relations_are_balanced_on(source):
    """For relative symbols 1 over the root of the mean of rows and width: here 127 rows of 32, or 81 of 24."""
    torch.manual_seed(0)
    layer = ph.MultiHeadAttention(32, ph.Relational(4, symbols=source), max_length=64)
    wanted = {None: (2 / (127 + 32)) ** 0.5, 40: (2 / (81 + 24)) ** 0.5}.get(getattr(source, "distance", 0), 1.0)
    assert layer.groups[0].symbol_std == source.start_std(32, 64) == pytest.approx(wanted)
    assert layer.symbols[0].table.std().item() == pytest.approx(wanted, rel=0.05)


def test_balancing_draws_nothing_but_the_weight():
    """Later draws are those after any other initialisation of as many numbers."""
    size, drawn = Sizes(2, 4, 4, 2), []
    for name in ("balanced", "paper"):
        torch.manual_seed(0)
        group = RelationalHeads(8, size, relation_init=name)
        drawn.append((group.value.weight, torch.rand(1) if name == "balanced" else None))
    assert_close(drawn[0][0], drawn[1][0], atol=0, rtol=0)
    torch.manual_seed(0)
    RelationalHeads(8, size)
    assert_close(torch.rand(1), drawn[0][1], atol=0, rtol=0)


def test_symmetric_relations_in_groups_of_keys_are_one_clear_line():
    with pytest.raises(ValueError, match="Disentangled: symmetric relations need kv_heads = heads = 4 but it is 2"):
        ph.MultiHeadAttention(16, ph.Disentangled(4, kv_heads=2, symmetric=True))


def test_on_the_meta_device_and_back():
    layer = ph.MultiHeadAttention(16, [ph.Relational(4)], device="meta").to_empty(device="cpu")
    initialise(layer, "cs336")
    assert layer(torch.randn(1, 3, 16)).isfinite().all()


def test_symbols_by_position_follow_the_positions_that_are_given():
    layer = ph.MultiHeadAttention(
        16, [ph.Relational(2, symbols=ph.PositionSymbols())], max_length=9, dtype=torch.float64
    )
    x, where = torch.randn(1, 3, 16, dtype=torch.float64), torch.tensor([[2, 3, 7]])
    y = layer(x, positions=where)
    assert_close(y, layer(x, symbols=layer.symbols[0].table[where]))
    assert not torch.allclose(y, layer(x))
