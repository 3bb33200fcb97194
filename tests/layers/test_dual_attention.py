"""Relational heads in a layer: beside others, causal, masked, with symbols from everywhere; errors; compilation."""

import re

import pytest
import torch
import zoo
from some import some
from torch.testing import assert_close

from polyhead.config import (
    Abstractor,
    Disentangled,
    Hyla,
    Linear,
    PositionSymbols,
    Relational,
    RelationalSymbols,
    RelativeBias,
    RelativeSymbols,
    Rotary,
    Softmax,
    SymbolicAttention,
)
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.block import TransformerBlock
from polyhead.layers.feedforward import MlpLayer

F64 = torch.float64
M = 48
FROZEN = SymbolicAttention(count=5, trainable=False, dim=12)
MIXTURES = {
    "dual": [Softmax(2), Relational(2)],
    "softmax relations": [Relational(2, relation_act="softmax"), Disentangled(2, relation_act="softmax")],
    "hyla": [Hyla(2), Relational(2, relations=3, symbols=RelativeSymbols(distance=2))],
    "three": [Softmax(2), Hyla(2), Disentangled(2, symbols=PositionSymbols())],
    "shared": [Softmax(2, dim=6), Relational(2, dim=6, share=True, symbols=FROZEN), Linear(2, share=True, dim=6)],
    "abstractor": [Abstractor(4, act="silu", symbols=RelationalSymbols()), Abstractor(2, dim=4)],
    "hidden": [Relational(2, hidden=9, symmetric=True, symbols=RelativeSymbols()), Abstractor(2, hidden=7)],
}


def make(heads, **options):
    torch.manual_seed(0)
    heads = (MIXTURES | zoo.EVERY)[heads] if isinstance(heads, str) else heads
    layer = MultiHeadAttention(M, heads, max_length=16, dtype=F64, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer.eval()


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS))
def test_the_future_is_invisible(mixture, positions):
    layer = make(mixture, causal=True, positions=zoo.POSITIONS[positions])
    x = torch.randn(2, 7, M, dtype=F64, requires_grad=True)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y[:, 3].sum(), x)
    assert gradient[:, :4].abs().sum(-1).gt(0).all()
    assert gradient[:, 4:].eq(0).all()
    changed = x.detach().clone()
    changed[:, 4:] = torch.randn(2, 3, M)
    assert_close(layer(changed)[:, :4], y[:, :4], atol=1e-12, rtol=0)
    assert_close(layer(x[:, :4]), y[:, :4], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mixture", zoo.EVERY)
def test_without_causal_the_future_is_visible(mixture):
    layer, x = make(mixture), torch.randn(1, 5, M, dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[:, 0].sum(), x)
    assert gradient.abs().sum(-1).gt(0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mixture", [name for name in MIXTURES if name != "abstractor"])
def test_padding_changes_nothing(mixture, causal):
    """Real tokens see each other as if no padding followed, whatever it holds."""
    layer = make(mixture, causal=causal, positions=Rotary())
    x, mask = torch.randn(2, 6, M, dtype=F64), torch.tensor([True] * 4 + [False] * 2)
    padded = x.clone()
    padded[:, 4:] = 1e6
    assert_close(layer(padded, mask=mask)[:, :4], layer(x[:, :4]), atol=1e-10, rtol=1e-10)
    nowhere = layer(x, mask=torch.zeros(6, 6).bool())
    assert_close(nowhere, torch.zeros_like(x), atol=0, rtol=0)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_eval_is_repeatable_and_training_drops(mixture):
    layer = make(mixture, dropout=0.5)
    x = torch.randn(2, 5, M, dtype=F64)
    assert_close(layer(x), layer(x), atol=0, rtol=0)
    layer.train()
    assert not torch.allclose(layer(x), layer(x))
    keep = torch.ones(1, layer.total_heads, 5, 5, dtype=F64)
    keep[:, 2:] = 0  # all but the first two heads
    only = layer(x, keep=keep)
    with torch.no_grad():
        layer.out.weight[:, 2 * layer.sizes[0].value_dim :] = 0
    assert_close(only, layer.eval()(x))


def test_shared_queries_and_keys_are_those_of_the_group_before():
    """Equal to a layer that has them twice, after normalising and turning."""
    options = {"positions": Rotary(), "qk_norm": True, "bias": True, "causal": True}
    heads = [Softmax(2, kv_heads=1), Relational(2, kv_heads=1)]
    one = make([heads[0], Relational(2, kv_heads=1, share=True)], **options)
    two, size = make(heads, **options), one.sizes[0]
    q, k = 2 * size.dim, size.dim
    rows = [*range(q), *range(q), *range(q, q + k), *range(q, q + k), *range(q + k, one.qkv.out_features)]
    state = {name: value for name, value in one.state_dict().items() if not name.startswith("qkv.")}
    state |= {name: getattr(one.qkv, name.removeprefix("qkv."))[rows] for name in ("qkv.weight", "qkv.bias")}
    state |= {f"qk_norms.{i + 2}.weight": state[f"qk_norms.{i}.weight"] for i in range(2)}
    two.load_state_dict(state)
    x = torch.randn(2, 5, M, dtype=F64)
    y = one(x)
    assert_close(y, two(x))
    y.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in one.parameters())
    assert one.qkv.out_features == two.qkv.out_features - q - k


def test_taps_know_where_values_come_from():
    """Of groups beside relational ones, too, which have no rows for values in the joint projection."""
    layer, taps = make([Relational(2), Softmax(2, value_dim=5), Linear(2, kv_heads=1)], bias=True), []
    x = torch.randn(2, 5, M, dtype=F64)
    layer(x, taps=taps)
    assert len(taps[0].groups) == 3
    for group in taps[0].groups[1:]:
        assert_close(torch.einsum("gem,bsm->bsge", group.w_value, x) + group.b_value, group.v)


def test_rotary_turns_attention_and_not_relations():
    layer, x = make("dual", positions=Rotary()), torch.randn(1, 5, M, dtype=F64)
    seen = [[], []]
    for i, where in enumerate((torch.arange(5), torch.arange(5) * 3)):
        layer(x, positions=where[None], taps=seen[i])
    near, far = (taps[0].groups[1] for taps in seen)
    assert_close(near.relations(), far.relations(), atol=0, rtol=0)
    assert not torch.allclose(near.code(), far.code())


def test_a_bias_is_of_the_scores_and_not_of_relations():
    layer, x, taps = make("softmax relations", positions=RelativeBias()), torch.randn(1, 5, M, dtype=F64), []
    layer(x, taps=taps)
    layer(x, bias=torch.randn(1, 4, 5, 5, dtype=F64), taps=taps)
    for before, after in some(zip(taps[0].groups, taps[1].groups, strict=True)):
        assert_close(before.relations(), after.relations(), atol=0, rtol=0)
        assert not torch.allclose(before.code(), after.code())
        assert not torch.allclose(before.output, after.output)


# --------------------------------------------------------------------------------------------------------- symbols
def test_a_table_of_relative_symbols_is_a_symbol_for_each_pair():
    """Beside one query at a time, with the symbols of its own keys; offsets beyond the table are clipped."""
    for causal, t, first in ((False, 6, 0), (True, 6, 0), (True, 2, 4), (False, 2, 3)):
        layer = make([Softmax(2), Relational(2, kv_heads=1), Disentangled(2)], causal=causal, own_symbols=False)
        x, table = torch.randn(2, 6, M, dtype=F64), torch.randn(5, M, dtype=F64)
        queries = x[:, 6 - t :]
        whole = layer(queries, x, symbols=table, first=first)
        rows = []
        for i in range(t):
            offset = (torch.arange(6) - first - i).clamp(-2, 2) + 2
            mask = torch.arange(6) <= 6 - t + i if causal else None
            rows.append(
                make([Softmax(2), Relational(2, kv_heads=1), Disentangled(2)], own_symbols=False)(
                    queries[:, i : i + 1], x, symbols=table[offset][None], mask=mask
                )
            )
        assert_close(whole, torch.cat(rows, 1))


def test_relative_symbols_count_tokens():
    """Causal: the last query is the last key; else query 0 is key 0, unless the caller says where it is."""
    heads = [Relational(4, symbols=RelativeSymbols(distance=3))]
    x = torch.randn(2, 6, M, dtype=F64)
    causal, both = make(heads, causal=True), make(heads)
    assert_close(causal(x[:, -2:], x), causal(x)[:, -2:])
    assert_close(both(x[:, :2], x), both(x)[:, :2])
    assert_close(both(x[:, -2:], x, first=4), both(x)[:, -2:])
    assert_close(both(x, positions=torch.arange(6)[None] * 2), both(x))
    taps: list = []
    both(x, taps=taps)
    table = both.groups[0].values(both.symbols[0].table)
    offset = (torch.arange(6) - torch.arange(6)[:, None]).clamp(-3, 3) + 3
    laid = taps[0].groups[0].v  # row j - i + 5 is that of key j for query i
    assert_close(laid[torch.arange(6) - torch.arange(6)[:, None] + 5], table[offset])


@pytest.mark.parametrize("mixture", zoo.EVERY)
def test_the_tail_of_a_block_is_the_end_of_the_whole(mixture):
    x = torch.randn(2, 7, M, dtype=F64)
    for causal in (False, True):
        block = TransformerBlock(make(mixture, causal=causal, positions=Rotary()), MlpLayer(M, dtype=F64), dtype=F64)
        assert_close(block(x, tail=2), block(x)[:, -2:])


def test_own_sources_are_those_that_groups_name():
    same, other = Relational(2), Relational(2, symbols=SymbolicAttention())
    layer = make([same, other, Disentangled(2), Softmax(2)])
    assert [type(source).__name__ for source in layer.symbols] == ["PositionSymbols", "SymbolicAttention"]
    bare = make([same, other, Disentangled(2), Softmax(2)], own_symbols=False)
    assert not any("symbols" in name for name in bare.state_dict())
    bare.load_state_dict({name: a for name, a in layer.state_dict().items() if not name.startswith("symbols")})
    x = torch.randn(2, 5, M, dtype=F64)
    first, second = (source(x) for source in layer.symbols)
    assert_close(bare(x, symbols=[first, second, first, None]), layer(x))


def test_symbols_of_cross_attention_are_those_of_the_senders():
    layer = make([Softmax(2), Relational(2, symbols=RelationalSymbols())])
    x, context = torch.randn(2, 3, M, dtype=F64), torch.randn(2, 5, M, dtype=F64)
    assert_close(layer(x, context), layer(x, context, symbols=layer.symbols[0](context)))
    one = torch.randn(1, 5, M, dtype=F64)
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
        lambda a, x: make("dual", own_symbols=False)(x),
        "own_symbols=False its relational heads need symbols=",
    ),
    "float mask": (lambda a, x: a(x, mask=torch.ones(5, 5)), "mask must be boolean, True where attention is allowed"),
    "beyond the offsets": (
        lambda a, x: make("hidden")(torch.zeros(1, 17, M, dtype=F64)),
        "17 positions but max_length",
    ),
    "shared with none": (
        lambda a, x: make([Relational(2, share=True)]),
        "Relational(share=True) needs a group before it of 2 heads, dim 24 and kv_heads 2 but there is none",
    ),
    "shared with others": (
        lambda a, x: make([Softmax(4, dim=6), Relational(2, dim=6, share=True)]),
        "Relational(share=True) needs a group before it of 2 heads, dim 6 and kv_heads 2 but it has 4, 6 and 4",
    ),
    "shared with other groups of keys": (
        lambda a, x: make([Softmax(2, kv_heads=1), Relational(2, share=True)]),
        "dim 12 and kv_heads 2 but it has 2, 12 and 1",
    ),
    "heads that do not fill the width": (
        lambda a, x: make([Softmax(2), Relational(3)]),
        "Softmax: 5 heads in all (2 of them here) do not divide the model width 48: give dim= and value_dim=",
    ),
    "heads of which one width is given": (
        lambda a, x: make([Softmax(2, dim=8, value_dim=8), Relational(3, dim=8)]),
        "Relational: 5 heads in all (3 of them here) do not divide the model width 48: give value_dim= (per head)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_gives_one_clear_line(name):
    call, text = ERRORS[name]
    with pytest.raises(ValueError, match=r"^\w+: ") as error:
        call(make("dual"), torch.randn(2, 5, M, dtype=F64))
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.compile  # without annotation checks, as users have it
def test_symbols_that_are_no_tensor():
    layer, x = make("dual"), torch.randn(2, 5, M, dtype=F64)
    for symbols, text in (
        (x.numpy(), "must be a Tensor, or a list of one (or None) a group, but are a ndarray"),
        ([None, x.numpy()], "of group 1 must be a Tensor but are a ndarray"),
        (PositionSymbols(), "but are a PositionSymbols"),
    ):
        with pytest.raises(ValueError, match=rf"^MultiHeadAttention: symbols .*{re.escape(text)}$"):
            layer(x, symbols=symbols)


@pytest.mark.parametrize("name", MIXTURES)
def test_under_autocast_everything_is_near_what_it_is_without(name):
    layer, x = make(name).float(), torch.randn(2, 5, M)
    exact = layer(x)
    wanted = torch.autograd.grad(exact.square().sum(), layer.parameters(), allow_unused=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), exact, atol=0.05 * exact.abs().max().item(), rtol=0)
    y.float().square().sum().backward()
    largest = max(gradient.abs().max().item() for gradient in wanted if gradient is not None)
    for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert_close(parameter.grad, gradient, atol=0.2 * largest, rtol=0)  # HYLA divides by small rms


def test_given_symbols_may_have_the_dtype_of_autocast():
    layer, x = make("dual").float(), torch.randn(2, 5, M)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(layer(x, symbols=x.bfloat16()), layer(x, symbols=x))
