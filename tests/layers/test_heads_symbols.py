"""Head groups whose values are symbols: equations from the weights, widths, initialisation."""

import pytest
import torch
from some import some
from torch.testing import assert_close

from polyhead.analysis import codes
from polyhead.config import (
    Abstractor,
    Disentangled,
    PositionSymbols,
    Relational,
    RelationalSymbols,
    RelativeSymbols,
    Softmax,
    SymbolicAttention,
)
from polyhead.config.sizes import Sizes
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.heads.symbolic import AbstractorHeads, DisentangledHeads, RelationalHeads
from polyhead.layers.taps import GroupTaps
from polyhead.models.initialise import initialise

F64 = torch.float64
SEVEN = PositionSymbols(dim=7)
KINDS = {
    "relational": Relational(4, dim=6, value_dim=3, relations=3, relation_dim=5, symbols=SEVEN),
    "tanh": Relational(4, dim=6, value_dim=3, relations=2, relation_act="tanh", symbols=SEVEN),
    "symmetric": Relational(4, dim=2, value_dim=3, relations=5, symmetric=True, symbols=SEVEN),
    "grouped": Relational(4, dim=6, value_dim=3, kv_heads=2, symbols=SEVEN),
    "softmax": Relational(4, dim=6, value_dim=3, relation_act="softmax", symbols=SEVEN),
    "hidden": Relational(4, dim=6, value_dim=3, hidden=9, symbols=SEVEN),
    "disentangled": Disentangled(4, dim=6, value_dim=3, kv_heads=2, relation_dim=2, symbols=SEVEN),
    "disentangled hidden": Disentangled(4, dim=6, value_dim=3, symmetric=True, hidden=9, symbols=SEVEN),
    "abstractor": Abstractor(4, dim=6, value_dim=3, kv_heads=1, symbols=SEVEN),
    "abstractor sigmoid": Abstractor(4, dim=6, value_dim=3, act="sigmoid", hidden=9, symbols=SEVEN),
}


def make(kind, *, dim=16, **options):
    torch.manual_seed(0)
    layer = MultiHeadAttention(dim, KINDS[kind], max_length=12, dtype=F64, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.eval()


def heads_of(x, layer, heads, d):
    """One map per head: (heads, tokens, d)."""
    weight, bias = layer.weight, layer.bias
    return torch.stack(
        [x @ weight[i * d : (i + 1) * d].T + (0 if bias is None else bias[i * d : (i + 1) * d]) for i in range(heads)]
    )


def by_hand(layer, x, context, symbols, look):
    """The output for one sequence, from the definitions."""
    group, size = layer.groups[0], layer.sizes[0]
    h, g, d, e = size.heads, size.kv_heads, size.dim, size.value_dim
    if group.hidden is not None:
        x, context = (torch.nn.functional.gelu(group.hidden.features(a)) for a in (x, context))
        q, k = heads_of(x, group.hidden.q, h, d), heads_of(context, group.hidden.k, g, d)
    else:
        part = torch.nn.Linear(1, 1)
        q, k = [], []
        for out, heads, row, a in ((q, h, 0, x), (k, g, h * d, context)):
            part.weight = torch.nn.Parameter(layer.qkv.weight[row : row + heads * d])
            part.bias = torch.nn.Parameter(layer.qkv.bias[row : row + heads * d])
            out.append(heads_of(a, part, heads, d))
        q, k = q[0], k[0]
    v = heads_of(symbols, group.value, g, e)
    k, v = (a.repeat_interleave(h // g, 0) for a in (k, v))
    scores = q @ k.mT / d**0.5
    code = torch.softmax(scores.masked_fill(~look, -torch.inf), -1).nan_to_num(0.0)
    if group.kind == "abstractor":
        code = code if group.relation_act == "softmax" else scores.sigmoid() * look
        outputs = code @ v
    elif group.kind == "disentangled":
        p = group.relation_dim
        k_rel = heads_of(context, group.q_rel if group.k_rel is None else group.k_rel, g, p).repeat_interleave(
            h // g, 0
        )
        outputs = (code * (heads_of(x, group.q_rel, h, p) @ k_rel.mT) / p**0.5) @ v
    else:
        r, p = group.relations, group.relation_dim
        k_rel = heads_of(context, group.q_rel if group.k_rel is None else group.k_rel, r, p)
        relations = heads_of(x, group.q_rel, r, p) @ k_rel.mT / p**0.5  # (r t s)
        if group.relation_act == "tanh":
            relations = relations.tanh()
        if group.relation_act == "softmax":
            relations = torch.softmax(relations.masked_fill(~look, -torch.inf), -1).nan_to_num(0.0)
        related = torch.stack([torch.stack([(code[i] * relations[j]).sum(-1) for j in range(r)], -1) for i in range(h)])
        outputs = code @ v + torch.stack([related[i] @ group.relation_weight[i].T for i in range(h)])
    return torch.cat(list(outputs), -1) @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_its_equation(kind, cross):
    layer = make(kind, bias=True)
    x = torch.randn(2, 4, 16, dtype=F64)
    context = torch.randn(2, 5, 16, dtype=F64) if cross else None
    source = x if context is None else context
    symbols = torch.randn(2, source.shape[1], 7, dtype=F64)
    look = torch.rand(4, source.shape[1]) > 0.3
    look[1] = False
    got = layer(x, context, mask=look, symbols=symbols)
    for b in range(2):
        assert_close(got[b], by_hand(layer, x[b], source[b], symbols[b], look), atol=1e-10, rtol=1e-10)
    own = layer(x, context, mask=look)
    assert_close(own[0], by_hand(layer, x[0], source[0], layer.symbols[0].table[: source.shape[1]], look))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_parameter(kind):
    layer = make(kind, bias=True, qk_norm=True)
    layer(torch.randn(2, 12, 16, dtype=F64)).square().sum().backward()
    for name, parameter in some(layer.named_parameters()):
        if parameter.numel():  # groups that take nothing of the joint projection leave it without rows
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.ne(0).any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_can_look_at_makes_the_output(kind):
    """Code, relations, weights of the taps: enough for each head's share of the output."""
    layer = make(kind, bias=True)
    taps = []
    x, mask = torch.randn(2, 6, 16, dtype=F64), torch.rand(2, 1, 6, 6) > 0.2
    y, code = layer(x, mask=mask, return_code=True, taps=taps)
    group = taps[0].groups[0]
    assert_close(group.code(), code, atol=0, rtol=0)
    assert_close(codes(taps[0], [0, 3, 5], [2, 3, 0]), code[:, :, [0, 3, 5], [2, 3, 0]].mT)
    v = group.v.repeat_interleave(4 // group.v.shape[2], 2)
    if group.kind == "relational":
        heads = torch.einsum("bhts,bshe->bthe", code, v)
        heads = heads + torch.einsum("her,bhts,brts->bthe", group.relation_weight, code, group.relations())
    else:
        weight = code * group.relations() if group.kind == "disentangled" else code
        heads = torch.einsum("bhts,bshe->bthe", weight, v)
    assert_close(group.output, heads)
    assert_close(torch.einsum("hme,bthe->btm", group.w_out, heads) + taps[0].b_out, y)
    assert group.w_value is None
    assert not any(
        a.shape[-2:] == (6, 6) for a in vars(group).values() if isinstance(a, torch.Tensor) and a is not mask
    )


def test_heads_without_relations_say_so():
    taps: list = []
    make("abstractor")(torch.randn(1, 4, 16, dtype=F64), taps=taps)
    assert isinstance(taps[0].groups[0], GroupTaps)
    with pytest.raises(ValueError, match="abstractor heads have no relations beside their code"):
        taps[0].groups[0].relations()


def test_default_sizes():
    """As many relations as heads, together as wide as the heads' values; too many are one wide."""
    size = Sizes(4, 8, 6, 4)
    for relations, wanted in ((None, 6), (2, 12), (5, 4), (24, 1), (50, 1)):
        assert RelationalHeads(16, size, relations=relations).relation_dim == wanted
    assert RelationalHeads(16, size, relations=3, relation_dim=9).q_rel.weight.shape == (27, 16)
    assert DisentangledHeads(16, size).relation_dim == 6
    assert AbstractorHeads(16, size, symbol_dim=5).value.weight.shape == (24, 5)


@pytest.mark.parametrize("preset", [None, "hyla", "cs336"])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"relations": 2}, {"relations": 32}, {"relations": 3, "relation_dim": 40}, {"symmetric": True}),
        *({"hidden": 48}, {"relation_act": "tanh"}, {"kv_heads": 2}),
    ],
    ids=str,
)
def test_relations_and_symbols_begin_alike(preset, options):
    """Of one standard deviation to a factor of two, whatever fills the maps around them."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(64, [Softmax(4), Relational(4, symbols=PositionSymbols(), **options)])
    if preset is not None:
        initialise(layer, preset)
    with torch.no_grad():
        taps: list = []
        layer(torch.randn(8, 32, 64), symbols=torch.randn(8, 32, 64), taps=taps)
        group = taps[0].groups[1]
        relations = torch.einsum("her,bhts,brts->bthe", group.relation_weight, group.code(), group.relations())
        symbols = group.output - relations
        values = taps[0].groups[0].output
    assert 0.5 < relations.std() / symbols.std() < 2
    assert 0.4 < relations.std() / values.std() < 2.5


@pytest.mark.parametrize("length", [16, 512])
@pytest.mark.parametrize("source", [PositionSymbols(), RelativeSymbols(), SymbolicAttention(), RelationalSymbols()])
def test_relations_balance_the_symbols_of_every_source(source, length):
    """Of relative symbols, whose table begins far below 1, as of others; in a layer and as a model fills them.

    A library's mixtures, narrower than N(0, 1), are not measured but taken as such: 2 to 4 here.
    """
    torch.manual_seed(0)
    layer = MultiHeadAttention(64, [Softmax(4), Relational(4, symbols=source)], max_length=length)
    for fill in (lambda: None, lambda: initialise(layer, "hyla")):
        fill()
        with torch.no_grad():
            taps: list = []
            layer(torch.randn(8, 16, 64), taps=taps)
            group = taps[0].groups[1]
            relations = torch.einsum("her,bhts,brts->bthe", group.relation_weight, group.code(), group.relations())
            assert 0.4 < relations.std() / (group.output - relations).std() < 5


def test_relation_weights_of_the_paper_and_of_the_package():
    size = Sizes(4, 16, 16, 4)
    for name, bound in (("paper", 8**-0.5), ("package", (16 * 8) ** -0.5)):
        weight = RelationalHeads(64, size, relations=8, relation_init=name).relation_weight
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        initialise(layer := torch.nn.Sequential(RelationalHeads(64, size, relations=8, relation_init=name)), "hyla")
        assert layer[0].relation_weight.abs().max() <= bound


@pytest.mark.parametrize("source", [RelativeSymbols(), RelativeSymbols(distance=40, dim=24), PositionSymbols()])
def test_symbols_begin_with_the_spread_that_relations_are_balanced_on(source):
    """For relative symbols 1 over the root of the mean of rows and width: here 127 rows of 32, or 81 of 24."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, Relational(4, symbols=source), max_length=64)
    wanted = {None: (2 / (127 + 32)) ** 0.5, 40: (2 / (81 + 24)) ** 0.5}.get(getattr(source, "distance", 0), 1.0)
    assert layer.groups[0].symbol_std == source.start_std(32, 64) == pytest.approx(wanted)
    assert layer.symbols[0].table.std().item() == pytest.approx(wanted, rel=0.05)


def test_balancing_draws_nothing_but_the_weight():
    """What comes after is as it would be after any other initialisation of as many numbers."""
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
        MultiHeadAttention(16, Disentangled(4, kv_heads=2, symmetric=True))


def test_on_the_meta_device_and_back():
    layer = MultiHeadAttention(16, [Relational(4)], device="meta").to_empty(device="cpu")
    initialise(layer, "cs336")
    assert layer(torch.randn(1, 3, 16)).isfinite().all()


def test_symbols_by_position_follow_the_positions_that_are_given():
    layer = MultiHeadAttention(16, [Relational(2, symbols=PositionSymbols())], max_length=9, dtype=F64)
    x, where = torch.randn(1, 3, 16, dtype=F64), torch.tensor([[2, 3, 7]])
    y = layer(x, positions=where)
    assert_close(y, layer(x, symbols=layer.symbols[0].table[where]))
    assert not torch.allclose(y, layer(x))
