"""Decoding with a cache equals the pass over the whole sequence, for all heads, positions and symbols."""

import functools
import itertools

import pytest
import torch
import zoo
from refusals import refused
from torch.testing import assert_close
from zoo import make_layer as make

import polyhead as ph
from polyhead.layers.cache import Cache, LayerCache
from polyhead.layers.symbols import build_symbols

F64 = torch.float64
T, M = 9, 48
DUAL = [ph.Softmax(2), ph.Relational(2)]


def tokens(t, b=2):
    return torch.randn(b, t, M, dtype=F64)


def in_pieces(layer, x, sizes, given=lambda a, b: {}, cache=None):
    """The output of one call after the other; the call of tokens `a` to `b` gets the arguments `given(a, b)`."""
    cache, pieces = LayerCache() if cache is None else cache, []
    for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        pieces.append(layer(x[:, a:b], cache=cache, **given(a, b)))
        assert cache.length == b
    assert b == x.shape[1]
    return torch.cat(pieces, 1)


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS))
def test_token_by_token_and_in_chunks(mixture, positions):
    """Outputs and gradients."""
    layer = make(zoo.EVERY[mixture], causal=True, positions=zoo.POSITIONS[positions], qk_norm=positions == "alibi")
    x = tokens(T).requires_grad_()
    whole, pieces = layer(x), in_pieces(layer, x, [1, 1, 1, 3, 1, 2])
    assert_close(pieces, whole, atol=1e-10, rtol=1e-10)
    grads = [torch.autograd.grad(y.square().sum(), x) for y in (pieces, whole)]
    assert_close(*grads, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS))
def test_a_window_and_positions_that_are_given(mixture, positions):
    layer = make(zoo.EVERY[mixture], causal=True, window=3, positions=zoo.POSITIONS[positions])
    x, cache = tokens(T), LayerCache()
    assert_close(in_pieces(layer, x, [2, 1, 5, 1]), layer(x), atol=1e-10, rtol=1e-10)
    where = torch.tensor([[0, 1, 3, 4, 5, 8, 9, 10, 12], [2, 3, 4, 5, 6, 7, 8, 9, 10]])
    pieces = in_pieces(layer, x, [4, 1, 4], lambda a, b: {"positions": where[:, a:b]}, cache)
    assert_close(pieces, layer(x, positions=where), atol=1e-10, rtol=1e-10)
    refused(lambda: layer(x[:, :1], cache=cache), "with a cache, positions must be given in every call or in none")


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS))
def test_cross_attention_reads_its_context_once(mixture, positions):
    layer, cache = make(zoo.EVERY[mixture], positions=zoo.POSITIONS[positions]), LayerCache()
    x, context, pieces = tokens(6), tokens(4), []
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])[:, None, None]
    for i in range(0, 6, 2):
        seen = context if i == 0 else torch.full_like(context, float("nan"))
        pieces.append(layer(x[:, i : i + 2], seen, mask=mask, cache=cache))
    assert_close(torch.cat(pieces, 1), layer(x, context, mask=mask), atol=1e-10, rtol=1e-10)
    assert (cache.length, cache.cross.length) == (0, 6)


def test_symbols_of_a_context_are_made_once():
    layer, asked, cache = make(DUAL), [], LayerCache()
    for module in (layer.symbols[0], layer.groups[1].value, layer.groups[1].k_rel):
        module.register_forward_hook(lambda module, *_: asked.append(module))
    x = tokens(3)
    for i in range(3):
        layer(x[:, i : i + 1], x, cache=cache)
    assert asked == [layer.symbols[0], layer.groups[1].k_rel, layer.groups[1].value]


def test_symbols_that_are_given_are_those_of_the_new_tokens():
    layer = make([*DUAL, ph.Relational(2)], causal=True, own_symbols=False)
    x, by_key, table = tokens(T), tokens(T, b=1), torch.randn(5, M, dtype=F64)
    pieces = in_pieces(layer, x, [4, 1, 4], lambda a, b: {"symbols": [None, by_key[:, a:b], table]})
    assert_close(pieces, layer(x, symbols=[None, by_key, table]), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("window", [None, 3])
def test_masks_biases_and_dropout_cover_all_keys(window):
    layer, x, cache = make([*DUAL, ph.Hyla(2)], causal=True, window=window), tokens(T), LayerCache()
    whole = {"mask": torch.rand(2, 1, T, T) > 0.3, "keep": (torch.rand(1, 6, T, T) > 0.3).to(F64)}
    whole["bias"] = torch.randn(1, 6, T, T, dtype=F64)

    def given(a, b):
        return {name: rows[:, :, a:b, :b] for name, rows in whole.items()}

    assert_close(in_pieces(layer, x, [4, 1, 4], given, cache), layer(x, **whole), atol=1e-10, rtol=1e-10)
    by_offset = torch.randn(6, 2 * T - 1, dtype=F64)  # column j - i + T - 1
    pieces = in_pieces(layer, x, [5, 1, 3], lambda a, b: {"bias": by_offset[:, T - b : T - b + (b - a) + b - 1]})
    assert_close(pieces, layer(x, bias=by_offset), atol=1e-10, rtol=1e-10)
    call = functools.partial(layer, x[:, :1], mask=torch.ones(1, 1, 1, 3).bool(), cache=cache)
    refused(call, r"mask must broadcast to \(b h t s\) = \(2, 6, 1, 10\) but is \(1, 1, 1, 3\)")


@pytest.mark.parametrize(
    "source",
    [ph.SymbolicAttention(), ph.PositionSymbols(), ph.RelativeSymbols(distance=2), ph.RelationalSymbols(neighbours=3)],
)
def test_sources_of_symbols_continue_from_a_cache(source):
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
    refused(lambda: Cache(0), "layers must be at least 1 but is 0")


def test_only_the_last_tokens_stay_stored():
    cache = LayerCache()
    for i in range(5):
        assert cache.last("x", torch.full((1, 2, 3), float(i)), 3).shape[1] == min(2 * i, 3) + 2
    assert cache.last("x", torch.zeros(1, 1, 3), 3)[0, :, 0].tolist() == [3, 4, 4, 0]
    cache.extend("k", torch.zeros(2, 3, 4))
    call = functools.partial(cache.extend, "k", torch.zeros(1, 1, 4))
    refused(call, r"stored k is \(b s \.\.\.\) = \(2, 3, 4\) but new k is \(1, 1, 4\)")


def test_attention_that_cannot_be_cached_is_refused():
    x, cache, full = tokens(3), LayerCache(), LayerCache()
    plain, causal = make(DUAL), make(DUAL, causal=True, positions=ph.Rotary())
    causal(tokens(16), cache=full)
    plain(x, x[:, :2], cache=cache)
    for call, text in (
        (lambda: plain(x, cache=LayerCache()), "attention with a cache must be causal"),
        (lambda: causal(x, x, cache=LayerCache()), "attention with a cache must not be causal, to another sequence"),
        (lambda: causal(x[:, :1], cache=full), "17 positions but max_length is 16"),
        (lambda: plain(x, x, cache=cache), "the cache is that of a context of 2 tokens but one of 3 came$"),
    ):
        refused(call, text)


# ---------------------------------------------------------------------- sums of linear heads
@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_linear_heads_keep_a_sum_that_does_not_grow(positions):
    """2 samples, 4 heads, widths 12 and 12, 8 bytes; other heads would keep every token."""
    heads = [ph.Linear(2, act="relu"), ph.Linear(2, kv_heads=1, dim=6)]
    layer = make(heads, causal=True, positions=zoo.POSITIONS[positions])
    x, cache = tokens(14), LayerCache()
    for first, last in ((0, 4), (4, 5), (5, 6), (6, 14)):
        assert_close(layer(x[:, first:last], cache=cache), layer(x)[:, first:last], atol=1e-10, rtol=1e-10)
        assert cache.nbytes == 2 * (2 * 12 * 12 + 1 * 6 * 12) * 8


def test_heads_whose_codes_need_every_key_keep_them():
    x = tokens(4)
    for heads, options in (
        ([ph.Linear(4, normalise="rms_heads")], {}),
        ([ph.Linear(4)], {"window": 2}),
        ([ph.Linear(4)], {"positions": ph.Alibi()}),
        ([ph.Softmax(4)], {}),
        ([ph.Linear(2), ph.Softmax(2, share=True)], {}),
        ([ph.Softmax(2), ph.Linear(2, share=True)], {}),
    ):
        layer, cache = make(heads, causal=True, **options), LayerCache()
        assert_close(in_pieces(layer, x, [2, 2], cache=cache), layer(x), atol=1e-10, rtol=1e-10)
        tensors = 1.5 if len(heads) == 2 else 2  # keys that are shared are kept once
        assert cache.nbytes == tensors * 2 * (1 if "window" in options else 4) * M * 8


GIVEN = {
    "mask": (torch.arange(5) != 2).view(1, 1, 1, 5),
    "bias": torch.arange(100.0, dtype=F64).view(1, 4, 5, 5).sin(),
    "keep": (torch.arange(100) % 3 > 0).to(F64).view(1, 4, 5, 5),
}


@pytest.mark.parametrize("name", GIVEN)
def test_linear_heads_take_limits_of_single_keys_from_the_first_call_on(name):
    layer, x, whole = make([ph.Linear(4)], causal=True), tokens(5), GIVEN[name]

    def given(a, b):
        return {name: whole[..., :b] if name == "mask" else whole[:, :, a:b, :b]}

    assert_close(in_pieces(layer, x, [3, 2], given), layer(x, **{name: whole}), atol=1e-10, rtol=1e-10)
    cache = LayerCache()
    layer(x[:, :3], cache=cache)
    call = functools.partial(layer, x[:, 3:4], cache=cache, **given(3, 4))
    refused(call, "linear heads keep the sum of earlier tokens, not each of them, so bias, mas")


def test_codes_and_taps_need_every_key():
    layer, x = make([ph.Linear(4)], causal=True), tokens(5)
    cache, taps, whole = LayerCache(), [], layer(x, return_code=True)[1]
    for a, b in ((0, 3), (3, 5)):
        code = layer(x[:, a:b], cache=cache, return_code=True, taps=taps)[1]
    for found in (code, taps[1].groups[0].code()):
        assert_close(found, whole[:, :, 3:])


# ---------------------------------------------------------------------- padding, other orders
def test_padding_stays_hidden():
    """Padding that one call announces stays masked in all later calls; tokens without a mask are real."""
    heads = [ph.Linear(2), ph.Softmax(2), ph.Linear(2, normalise="rms_heads"), ph.Hyla(2)]
    layer, x = make(heads, causal=True, positions=ph.Rotary()), tokens(8)
    mask, more = torch.ones(2, 8, dtype=torch.bool), torch.rand(2, 1, 8, 8) > 0.3
    mask[0, :2] = mask[1, 4:6] = False

    def expect(cache, a, b):
        cache.expect(None if mask[:, a:b].all() else mask[:, a:b], x[:, a:b])
        return {}

    for sizes in ([3, 3, 2], [6, 1, 1]):
        cache = Cache(1)
        pieces = in_pieces(layer, x, sizes, functools.partial(expect, cache), cache[0])
        assert_close(pieces, layer(x, mask=mask[:, None, None]), atol=1e-10, rtol=1e-10)
        assert torch.equal(cache[0].real, mask)
    cache = Cache(1)  # a mask of the caller hides more
    pieces = in_pieces(layer, x, sizes, lambda a, b: expect(cache, a, b) | {"mask": more[:, :, a:b, :b]}, cache[0])
    assert_close(pieces, layer(x, mask=more & mask[:, None, None]), atol=1e-10, rtol=1e-10)
    cache = Cache(1)
    layer(x[:, :4], cache=cache[0])
    cache.expect(mask[:, 4:], x[:, 4:])  # padding only later
    assert_close(layer(x[:, 4:], cache=cache[0])[1:], layer(x, mask=mask[:, None, None])[1:, 4:])
    refused(lambda: cache.expect(None, x[:1]), "Cache: 2 sequences were wanted but 1 came")


@pytest.mark.parametrize("mixture", zoo.EVERY)
def test_sequences_in_another_order(mixture):
    """The rows of a beam search: some are continued twice, some end.  Shared positions and symbols stay."""
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


def test_cached_tensors_of_a_context_are_reordered_too():
    layer, x, context, rows = make(DUAL), tokens(4, b=3), tokens(5, b=3), torch.tensor([1, 1, 0])
    cache, one = Cache(1), Cache(1)
    layer(x[:, :2], context, cache=cache[0])
    cache.reorder(rows)
    y = layer(x[rows, 2:], torch.full_like(context, float("nan")), cache=cache[0])
    assert_close(y, layer(x[rows], context[rows])[:, 2:], atol=1e-10, rtol=1e-10)
    layer(x[:1], x[:1], cache=one[0])
    refused(lambda: one.reorder(rows), "^Cache: the cache of one sequence cannot become that of 3: repeat")
