"""Decoding with a cache equals the pass over the whole sequence, for all heads, positions and symbols."""

import pytest
import torch
import zoo
from torch.testing import assert_close
from zoo import make_layer as make

import polyhead as ph
from polyhead.layers.cache import Cache, LayerCache
from polyhead.layers.symbols import build_symbols

F64 = torch.float64
T, M = 9, 48


def in_pieces(layer, x, sizes, **options):
    cache, pieces, first = LayerCache(), [], 0
    for size in sizes:
        assert cache.length == first
        pieces.append(layer(x[:, first : first + size], cache=cache, **options))
        first += size
    assert cache.length == first == x.shape[1]
    return torch.cat(pieces, 1)


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS))
def test_token_by_token_and_in_chunks(mixture, positions):
    layer = make(zoo.EVERY[mixture], causal=True, positions=zoo.POSITIONS[positions], qk_norm=positions == "alibi")
    x = torch.randn(2, T, M, dtype=F64)
    whole = layer(x)
    assert_close(in_pieces(layer, x, [1, 1, 1, 3, 1, 2]), whole, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS))
def test_a_window_and_positions_that_are_given(mixture, positions):
    layer = make(zoo.EVERY[mixture], causal=True, window=3, positions=zoo.POSITIONS[positions])
    x = torch.randn(2, T, M, dtype=F64)
    assert_close(in_pieces(layer, x, [2, 1, 5, 1]), layer(x), atol=1e-10, rtol=1e-10)
    where = torch.tensor([[0, 1, 3, 4, 5, 8, 9, 10, 12], [2, 3, 4, 5, 6, 7, 8, 9, 10]])
    whole, cache, pieces = layer(x, positions=where), LayerCache(), []
    for a, b in ((0, 4), (4, 5), (5, 9)):
        pieces.append(layer(x[:, a:b], positions=where[:, a:b], cache=cache))
    assert_close(torch.cat(pieces, 1), whole, atol=1e-10, rtol=1e-10)
    with pytest.raises(ValueError, match="with a cache, positions must be given in every call or in none"):
        layer(x[:, :1], cache=cache)


@pytest.mark.parametrize("mixture", zoo.EVERY)
def test_cross_attention_looks_at_its_context_once(mixture):
    layer = make(zoo.EVERY[mixture], positions=ph.RelativeBias(8, 8))
    x, context = torch.randn(2, 6, M, dtype=F64), torch.randn(2, 4, M, dtype=F64)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])[:, None, None]
    whole, cache, pieces = layer(x, context, mask=mask), LayerCache(), []
    for i in range(0, 6, 2):
        seen = context if i == 0 else torch.full_like(context, float("nan"))
        pieces.append(layer(x[:, i : i + 2], seen, mask=mask, cache=cache))
    assert_close(torch.cat(pieces, 1), whole, atol=1e-10, rtol=1e-10)
    assert (cache.length, cache.cross.length) == (0, 6)


def test_symbols_of_a_context_are_made_once():
    layer, asked = make([ph.Softmax(2), ph.Relational(2)]), []
    for module in (layer.symbols[0], layer.groups[1].value, layer.groups[1].k_rel):
        module.register_forward_hook(lambda module, *_: asked.append(module))
    x, cache = torch.randn(2, 3, M, dtype=F64), LayerCache()
    for i in range(3):
        layer(x[:, i : i + 1], x, cache=cache)
    assert asked == [layer.symbols[0], layer.groups[1].k_rel, layer.groups[1].value]


def test_rotary_cross_attention_goes_on_counting():
    layer = make([ph.Softmax(2), ph.Relational(2)], positions=ph.Rotary())
    x, context = torch.randn(2, 6, M, dtype=F64), torch.randn(2, 4, M, dtype=F64)
    cache = LayerCache()
    pieces = [layer(x[:, i : i + 1], context, cache=cache) for i in range(6)]
    assert_close(torch.cat(pieces, 1), layer(x, context), atol=1e-10, rtol=1e-10)


def test_symbols_that_are_given_are_those_of_the_new_tokens():
    layer = make([ph.Softmax(2), ph.Relational(2), ph.Relational(2)], causal=True, own_symbols=False)
    x, by_key, table = (torch.randn(*shape, dtype=F64) for shape in ((2, T, M), (1, T, M), (5, M)))
    whole, cache, pieces = layer(x, symbols=[None, by_key, table]), LayerCache(), []
    for a, b in ((0, 4), (4, 5), (5, 9)):
        pieces.append(layer(x[:, a:b], symbols=[None, by_key[:, a:b], table], cache=cache))
    assert_close(torch.cat(pieces, 1), whole, atol=1e-10, rtol=1e-10)


def test_masks_and_dropout_cover_all_keys():
    layer = make([ph.Softmax(2), ph.Relational(2)], causal=True)
    x, mask = torch.randn(2, T, M, dtype=F64), torch.rand(2, 1, 1, T) > 0.3
    keep = (torch.rand(1, 4, T, T) > 0.3).to(F64)
    whole, cache, pieces = layer(x, mask=mask, keep=keep), LayerCache(), []
    for a, b in ((0, 4), (4, 5), (5, 9)):
        pieces.append(layer(x[:, a:b], mask=mask[..., :b], keep=keep[:, :, a:b, :b], cache=cache))
    assert_close(torch.cat(pieces, 1), whole, atol=1e-10, rtol=1e-10)
    with pytest.raises(
        ValueError, match=r"mask must broadcast to \(b h t s\) = \(2, 4, 1, 10\) but is \(1, 1, 1, 9\)"
    ) as e:
        layer(x[:, :1], mask=torch.ones(1, 1, 1, T).bool(), cache=cache)
    assert "\n" not in str(e.value)


def test_gradients_go_through_a_cache():
    layer = make([ph.Softmax(2), ph.Relational(2)], causal=True)
    x = torch.randn(2, T, M, dtype=F64, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).square().sum(), x)
    assert_close(torch.autograd.grad(in_pieces(layer, x, [4, 5]).square().sum(), x), wanted)


@pytest.mark.parametrize(
    "source",
    [ph.SymbolicAttention(), ph.PositionSymbols(), ph.RelativeSymbols(distance=2), ph.RelationalSymbols(neighbours=3)],
)
def test_sources_of_symbols_go_on(source):
    torch.manual_seed(0)
    module = build_symbols(source, 16, causal=True, max_length=16)
    x, cache = torch.randn(2, T, 16), LayerCache()
    pieces = [module(x[:, i : i + 1], first=i, cache=cache) for i in range(T)]
    together = pieces[0] if pieces[0].ndim == 2 else torch.cat(pieces, 1)
    assert_close(together, module(x))


def test_one_memory_for_each_layer():
    cache = Cache(3)
    assert (len(cache), cache.length, len(set(cache))) == (3, 0, 3)
    assert cache[1].cross is cache[1].cross is not cache[2].cross
    cache[0].length += 4
    assert cache.length == 4
    with pytest.raises(ValueError, match="layers must be at least 1 but is 0"):
        Cache(0)


def test_it_keeps_what_it_must_and_no_more():
    cache = LayerCache()
    for i in range(5):
        assert cache.last("x", torch.full((1, 2, 3), float(i)), 3).shape[1] == min(2 * i, 3) + 2
    assert cache.last("x", torch.zeros(1, 1, 3), 3)[0, :, 0].tolist() == [3, 4, 4, 0]
    cache.extend("k", torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"stored k is \(b s \.\.\.\) = \(2, 3, 4\) but new k is \(1, 1, 4\)"):
        cache.extend("k", torch.zeros(1, 1, 4))


def test_attention_that_cannot_be_cached_says_so():
    x = torch.randn(1, 3, M, dtype=F64)
    with pytest.raises(ValueError, match="attention with a cache must be causal"):
        make([ph.Softmax(4)])(x, cache=LayerCache())
    with pytest.raises(ValueError, match="attention with a cache must not be causal, to another sequence"):
        make([ph.Softmax(4)], causal=True)(x, x, cache=LayerCache())
    layer = make([ph.Softmax(4)], causal=True, positions=ph.Rotary())
    cache = LayerCache()
    layer(torch.randn(1, 16, M, dtype=F64), cache=cache)
    with pytest.raises(ValueError, match="17 positions but max_length is 16"):
        layer(x[:, :1], cache=cache)


@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_linear_heads_keep_a_sum_that_does_not_grow(positions):
    """Of keys of all kinds of heads every token's would be there: 2 samples, 4 heads, widths 12 and 12, 8 bytes."""
    heads = [ph.Linear(2, act="relu"), ph.Linear(2, kv_heads=1, dim=6)]
    layer = make(heads, causal=True, positions=zoo.POSITIONS[positions])
    x, cache, sizes = torch.randn(2, 14, M, dtype=F64), LayerCache(), []
    pieces = []
    for first, last in ((0, 4), (4, 5), (5, 6), (6, 14)):
        pieces.append(layer(x[:, first:last], cache=cache))
        sizes.append(cache.nbytes)
    assert_close(torch.cat(pieces, 1), layer(x), atol=1e-10, rtol=1e-10)
    assert sizes == [2 * (2 * 12 * 12 + 1 * 6 * 12) * 8] * 4


def test_heads_whose_codes_need_every_key_keep_them():
    x = torch.randn(2, 4, M, dtype=F64)
    for heads, options in (
        ([ph.Linear(4, normalise="rms_heads")], {}),
        ([ph.Linear(4)], {"window": 2}),
        ([ph.Linear(4)], {"positions": ph.Alibi()}),
        ([ph.Softmax(4)], {}),
        ([ph.Linear(2), ph.Softmax(2, share=True)], {}),
        ([ph.Softmax(2), ph.Linear(2, share=True)], {}),
    ):
        layer, cache = make(heads, causal=True, **options), LayerCache()
        whole = torch.cat([layer(x[:, :2], cache=cache), layer(x[:, 2:], cache=cache)], 1)
        assert_close(whole, layer(x), atol=1e-10, rtol=1e-10)
        tensors = 1.5 if len(heads) == 2 else 2  # keys that are shared are kept once
        tokens = 1 if "window" in options else 4
        assert cache.nbytes == tensors * 2 * tokens * M * 8


@pytest.mark.parametrize("given", ["mask", "bias", "keep"])
def test_what_reaches_single_keys_is_given_from_the_first_call_on(given):
    layer, x = make([ph.Linear(4)], causal=True), torch.randn(2, 5, M, dtype=F64)
    whole = {"mask": torch.rand(2, 1, 1, 5) > 0.4, "bias": torch.randn(1, 4, 5, 5, dtype=F64)}
    whole["keep"] = (torch.rand(1, 4, 5, 5) > 0.4).to(F64)
    cache, pieces = LayerCache(), []
    for a, b in ((0, 3), (3, 5)):
        rows = whole[given] if given == "mask" else whole[given][:, :, a:b]
        pieces.append(layer(x[:, a:b], cache=cache, **{given: rows[..., :b]}))
    assert_close(torch.cat(pieces, 1), layer(x, **{given: whole[given]}), atol=1e-10, rtol=1e-10)
    cache = LayerCache()
    layer(x[:, :3], cache=cache)
    with pytest.raises(ValueError, match="linear heads keep the sum of earlier tokens, not each of them, so bias, mas"):
        layer(x[:, 3:4], cache=cache, **{given: whole[given][:, :, -1:, :4]})


def test_codes_and_taps_need_every_key():
    layer, x = make([ph.Linear(4)], causal=True), torch.randn(2, 5, M, dtype=F64)
    cache, codes, taps = LayerCache(), [], []
    for a, b in ((0, 3), (3, 5)):
        codes.append(layer(x[:, a:b], cache=cache, return_code=True, taps=taps)[1])
    whole = layer(x, return_code=True)[1]
    assert_close(codes[1], whole[:, :, 3:])
    assert_close(taps[1].groups[0].code(), whole[:, :, 3:])


def test_gradients_go_through_a_sum():
    layer = make([ph.Linear(4, act="gelu")], causal=True, positions=ph.Rotary())
    x = torch.randn(2, T, M, dtype=F64, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).square().sum(), x)
    assert_close(torch.autograd.grad(in_pieces(layer, x, [4, 1, 4]).square().sum(), x), wanted)


def test_padding_stays_hidden():
    """What the cache was told of the first tokens holds for all calls; what it was not told is real."""
    layer = make(
        [ph.Linear(2), ph.Softmax(2), ph.Linear(2, normalise="rms_heads"), ph.Hyla(2)],
        causal=True,
        positions=ph.Rotary(),
    )
    x, mask = torch.randn(2, 8, M, dtype=F64), torch.ones(2, 8, dtype=torch.bool)
    mask[0, :2] = mask[1, 4:6] = False
    for told in (((0, 3), (3, 6), (6, 8)), ((0, 6), (6, 7), (7, 8))):
        cache, pieces = Cache(1), []
        for a, b in told:
            cache.expect(None if mask[:, a:b].all() else mask[:, a:b], x[:, a:b])
            pieces.append(layer(x[:, a:b], cache=cache[0]))
        assert_close(torch.cat(pieces, 1), layer(x, mask=mask[:, None, None]), atol=1e-10, rtol=1e-10)
        assert torch.equal(cache[0].real, mask)
    more, cache, pieces = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) > 0.3, Cache(1), []
    for a, b in told:  # and a mask of the caller's hides what it hides beside the padding
        cache.expect(mask[:, a:b], x[:, a:b])
        pieces.append(layer(x[:, a:b], mask=more[:, :, a:b, :b], cache=cache[0]))
    assert_close(torch.cat(pieces, 1), layer(x, mask=more & mask[:, None, None]), atol=1e-10, rtol=1e-10)
    cache = Cache(1)
    layer(x[:, :4], cache=cache[0])
    cache.expect(mask[:, 4:], x[:, 4:])  # padding only later
    assert_close(layer(x[:, 4:], cache=cache[0])[1:], layer(x, mask=mask[:, None, None])[1:, 4:])
    with pytest.raises(ValueError, match="Cache: 2 sequences were wanted but 1 came"):
        cache.expect(None, x[:1])


@pytest.mark.parametrize("mixture", zoo.EVERY)
def test_sequences_in_another_order(mixture):
    """The rows of a beam search: some go on twice, some end.  Positions and symbols that all share stay."""
    layer = make(zoo.EVERY[mixture], causal=True, positions=ph.Rotary())
    x, rows = torch.randn(4, 6, M, dtype=F64), torch.tensor([2, 0, 0])
    cache = Cache(1)
    cache.reorder(rows)  # nothing yet
    mask = torch.tensor([[True, True], [False, True], [True, True], [False, True]])
    for a, b in ((0, 2), (2, 4)):
        cache.expect(None if a else mask, x[:, a:b])
        layer(x[:, a:b], cache=cache[0])
    cache.reorder(rows)
    cache.expect(None, x[rows, 4:])
    wanted = layer(x[rows], mask=torch.cat((mask[rows], torch.ones(3, 4, dtype=torch.bool)), 1)[:, None, None])
    assert_close(layer(x[rows, 4:], cache=cache[0]), wanted[:, 4:], atol=1e-10, rtol=1e-10)


def test_what_is_kept_of_a_context_is_reordered_too():
    layer = make([ph.Softmax(2), ph.Relational(2)])
    x, context, rows = torch.randn(3, 4, M, dtype=F64), torch.randn(3, 5, M, dtype=F64), torch.tensor([1, 1, 0])
    cache = Cache(1)
    layer(x[:, :2], context, cache=cache[0])
    cache.reorder(rows)
    y = layer(x[rows, 2:], torch.full_like(context, float("nan")), cache=cache[0])
    assert_close(y, layer(x[rows], context[rows])[:, 2:], atol=1e-10, rtol=1e-10)
    cache = Cache(1)
    layer(x[:1], x[:1], cache=cache[0])
    with pytest.raises(ValueError, match=r"^Cache: the cache of one sequence cannot become that of 3: repeat"):
        cache.reorder(rows)


def test_a_context_of_another_length_is_refused():
    layer, cache, x = make([ph.Softmax(2), ph.Hyla(2)]), LayerCache(), torch.randn(2, 3, M, dtype=F64)
    layer(x, x[:, :2], cache=cache)
    with pytest.raises(ValueError, match=r"the cache is that of a context of 2 tokens but one of 3 came$"):
        layer(x, x, cache=cache)
