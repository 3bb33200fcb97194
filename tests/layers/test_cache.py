"""Decoding with a cache equals the pass over the whole sequence, for all heads, positions and symbols."""

import copy
import functools
import itertools

import pytest
import torch
import zoo
from refusals import refused, refusing
from torch.testing import assert_close
from zoo import make_layer as make, tokens

import polyhead as ph
from polyhead.layers.cache import Cache, LayerCache

F64 = torch.float64
T, M = 9, 48
DUAL = [ph.Softmax(2), ph.Relational(2)]


def in_pieces(layer, x, sizes, arguments=lambda a, b: {}, cache=None):
    """The output of one call after the other; the call of tokens `a` to `b` gets `arguments(a, b)`."""
    cache, pieces = LayerCache() if cache is None else cache, []
    for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        pieces.append(layer(x[:, a:b], cache=cache, **arguments(a, b)))
        assert cache.length == b
    assert b == x.shape[1]
    return torch.cat(pieces, 1)


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS)[::3])
def test_token_by_token_and_in_chunks(mixture, positions):
    """Outputs and gradients."""
    layer = make(zoo.EVERY[mixture], causal=True, positions=zoo.POSITIONS[positions], qk_norm=positions == "alibi")
    x = tokens(T).requires_grad_()
    expected, pieces = layer(x), in_pieces(layer, x, [1, 1, 0, 1, 3, 1, 2])
    assert_close(pieces, expected, atol=1e-10, rtol=1e-10)
    grads = [torch.autograd.grad(y.square().sum(), x) for y in (pieces, expected)]
    assert_close(*grads, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS)[::3])
def test_cross_attention_reads_its_context_once(mixture, positions):
    layer, cache = make(zoo.EVERY[mixture], positions=zoo.POSITIONS[positions]), LayerCache()
    x, context, pieces, calls = tokens(6), tokens(4), [], []
    for source in layer.symbols:
        source.register_forward_hook(lambda source, *_: calls.append(source))
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])[:, None, None]
    for i in range(0, 6, 2):
        new_context = context if i == 0 else torch.full_like(context, float("nan"))
        pieces.append(layer(x[:, i : i + 2], new_context, mask=mask, cache=cache))
    assert calls == [*layer.symbols]
    assert_close(torch.cat(pieces, 1), layer(x, context, mask=mask), atol=1e-10, rtol=1e-10)
    assert (cache.length, cache.cross.length) == (0, 6)


def test_symbols_that_are_given_are_those_of_the_new_tokens():
    layer = make([*DUAL, ph.Relational(2)], causal=True, own_symbols=False)
    x, by_key, table = tokens(T), tokens(T, b=1), torch.randn(5, M, dtype=F64)
    pieces = in_pieces(layer, x, [4, 1, 4], lambda a, b: {"symbols": [None, by_key[:, a:b], table]})
    assert_close(pieces, layer(x, symbols=[None, by_key, table]), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_masks_biases_and_dropout_cover_all_keys(window):
    layer, x, cache = make([*DUAL, ph.Hyla(2)], causal=True, window=window), tokens(T), LayerCache()
    full_arguments = {"mask": torch.rand(2, 1, T, T) > 0.3, "keep": (torch.rand(1, 6, T, T) > 0.3).to(F64)}
    full_arguments["bias"] = torch.randn(1, 6, T, T, dtype=F64)

    def arguments(a, b):
        return {name: rows[:, :, a:b, :b] for name, rows in full_arguments.items()}

    pieces = in_pieces(layer, x, [1, 0, 4, 4], arguments, cache)
    assert_close(pieces, layer(x, **full_arguments), atol=1e-10, rtol=1e-10)
    by_offset = torch.randn(6, 2 * T - 1, dtype=F64)  # column j - i + T - 1
    pieces = in_pieces(layer, x, [5, 1, 3], lambda a, b: {"bias": by_offset[:, T - b : T - b + (b - a) + b - 1]})
    assert_close(pieces, layer(x, bias=by_offset), atol=1e-10, rtol=1e-10)
    call = functools.partial(layer, x[:, :1], mask=torch.ones(1, 1, 1, 3).bool(), cache=cache)
    refused(call, r"mask must broadcast to \(b h t s\) = \(2, 6, 1, 10\) but is \(1, 1, 1, 3\)")


def test_attention_that_cannot_be_cached_is_refused():
    x, cache, full, stored = tokens(3), LayerCache(), LayerCache(), LayerCache()
    plain, causal = make(DUAL), make(DUAL, causal=True, positions=ph.Rotary())
    causal(tokens(16), cache=full)
    plain(x, x[:, :2], cache=cache)
    stored.extend("k", torch.zeros(2, 3, 4))
    for call, message in (
        (lambda: Cache(1.5), "Cache: layers must be an integer of at least 1 but is 1.5"),
        (lambda: stored.extend("k", torch.zeros(1, 1, 4)), r"stored k is .* = \(2, 3, 4\) but new k is \(1, 1, 4\)"),
        (lambda: plain(x, cache=LayerCache()), "attention with a cache must be causal"),
        (lambda: causal(x, x, cache=LayerCache()), "attention with a cache must not be causal, to another sequence"),
        (lambda: causal(x[:, :1], cache=full), "17 positions but max_length is 16"),
        (lambda: plain(x, x, cache=cache), "the cache is of a context of 2 tokens, got one of 3$"),
    ):
        refused(call, message)


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
        ([ph.Linear(4)], {"window": 2}),
        ([ph.Linear(2), ph.Softmax(2, share=True)], {}),
        ([ph.Softmax(2), ph.Linear(2, share=True)], {}),
    ):
        layer, cache = make(heads, causal=True, **options), LayerCache()
        assert_close(in_pieces(layer, x, [2, 2], cache=cache), layer(x), atol=1e-10, rtol=1e-10)
        tensors = 1.5 if len(heads) == 2 else 2  # keys that are shared are kept once
        assert cache.nbytes == tensors * 2 * (1 if "window" in options else 4) * M * 8


def test_linear_heads_take_limits_of_single_keys_from_the_first_call_on():
    """The first with tokens."""
    layer, x, cache = make([ph.Linear(4)], causal=True), tokens(5), LayerCache()
    mask = (torch.arange(5) != 2).view(1, 1, 1, 5)
    pieces = in_pieces(layer, x, [3, 2], lambda a, b: {"mask": mask[..., :b]})
    assert_close(pieces, layer(x, mask=mask), atol=1e-10, rtol=1e-10)
    pieces = in_pieces(layer, x, [0, 3, 2], lambda a, b: {"mask": mask[..., :3]} if b == 3 else {})
    assert_close(pieces[:, 3:], layer(x)[:, 3:], atol=1e-10, rtol=1e-10)
    layer(x[:, :3], cache=cache)
    for arguments in ({"mask": mask[..., :4]}, {"bias": torch.ones(1, 4, 1, 4, dtype=F64)}, {"return_code": True}):
        call = functools.partial(layer, x[:, 3:4], cache=cache, **arguments)
        refused(call, "linear heads keep the sum of earlier tokens, not each of them, so bias, mas")


# ---------------------------------------------------------------------- padding, other orders
def test_padding_stays_hidden_under_a_mask_of_the_caller_and_where_it_comes_later():
    """Padding that one call announces, with or after the first; that models pass it on is in tests/models."""
    heads = [ph.Linear(2), ph.Softmax(2), ph.Linear(2, normalise="rms_heads"), ph.Hyla(2)]
    layer, x = make(heads, causal=True, positions=ph.Rotary()), tokens(8)
    mask, caller_mask = torch.ones(2, 8, dtype=torch.bool), torch.rand(2, 1, 8, 8) > 0.3
    mask[1, 4:6] = False
    for arguments in (lambda a, b: {}, lambda a, b: {"mask": caller_mask[:, :, a:b, :b]}):
        cache, pieces = Cache(1), []
        for a, b in ((0, 3), (3, 6), (6, 6), (6, 8)):
            cache.expect(None if mask[:, a:b].all() else mask[:, a:b], x[:, a:b])
            pieces.append(layer(x[:, a:b], cache=cache[0], **arguments(a, b)))
        full_mask = mask[:, None, None] & arguments(0, 8).get("mask", torch.tensor(True))
        assert_close(torch.cat(pieces, 1), layer(x, mask=full_mask), atol=1e-10, rtol=1e-10)
        assert torch.equal(cache[0].real, mask)
    refused(lambda: cache.expect(None, x[:1]), "Cache: the number of sequences must be 2, got 1")
    one = Cache(1)
    layer(x[:1], cache=one[0])
    refused(lambda: one.expect(mask, x), "Cache: the number of sequences must be 1, got 2")
    for t in (1, 2):
        refused(lambda t=t: layer(x[:, :t], cache=cache[0]), f"`expect` must .* but it announced 0, got {t}$")


@pytest.mark.parametrize("mixture", [*zoo.EVERY][::3])
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
    expected = layer(x[rows], mask=torch.cat((mask[rows], torch.ones(3, 4, dtype=torch.bool)), 1)[:, None, None])
    assert_close(layer(x[rows, 4:], cache=cache[0]), expected[:, 4:], atol=1e-10, rtol=1e-10)


# ----------------------------------------------------------------------------------------------- at the edges of caches
def test_a_table_of_offsets_has_no_rows_of_sequences():
    layer = ph.MultiHeadAttention(16, ph.Relational(2, symbols=ph.RelativeSymbols(distance=1))).eval()
    x, context, rows = torch.randn(3, 6, 16), torch.randn(3, 5, 16), torch.tensor([2, 0, 1])
    cache = Cache(1)
    layer(x[:, :3], context, cache=cache[0])
    cache.reorder(rows)
    y = layer(x[rows][:, 3:], context[rows], cache=cache[0])
    assert_close(y, layer(x[rows], context[rows])[:, 3:])
    cache.reorder([])
    assert layer(x[:0], context[:0], cache=cache[0]).shape == (0, 6, 16)


def test_a_call_without_queries_keeps_no_context():
    layer, cache, x = ph.MultiHeadAttention(16, ph.Softmax(2)).eval(), LayerCache(), torch.randn(2, 4, 16)
    layer(x[:, :0], x + 1, cache=cache)
    assert_close(layer(x, x, cache=cache), layer(x, x))
    assert layer(x[:, :0], x, cache=cache).shape == (2, 0, 16)


def test_mistakes_with_caches_are_one_line():
    x, cache = torch.randn(2, 4, 16), Cache(1)
    for mask in (torch.zeros(2, 4), torch.ones(2, 1, dtype=torch.bool)):
        with refusing("Cache: the mask must be Boolean of shape (2, 4), True at real tokens, but is torch."):
            cache.expect(mask, x)
    cache.expect(torch.ones(2, 4, dtype=torch.bool), x)
    for rows, wrong in (([True], "sequences but are torch.bool (1,)"), ([0, 2], "its 2 sequences but are [0, 2]")):
        with refusing(f"Cache: rows must be indices of {wrong}"):
            cache.reorder(torch.tensor(rows))


def test_a_row_of_a_mask_of_pairs_hides_no_neighbours():
    layer = ph.MultiHeadAttention(8, ph.Relational(2, symbols=ph.RelationalSymbols(count=5))).eval()
    x, context, mask = torch.randn(1, 3, 8), torch.randn(1, 6, 8), torch.rand(3, 6) < 0.5
    rows = [layer(x[:, i : i + 1], context, mask=mask[i : i + 1]) for i in range(3)]
    assert_close(torch.cat(rows, 1), layer(x, context, mask=mask))


def test_a_copy_goes_back():
    layer, x = ph.MultiHeadAttention(16, [ph.Softmax(1), ph.Linear(1)], causal=True), torch.randn(2, 6, 16)
    cache = Cache(1)
    layer(x[:, :3], cache=cache[0])  # with gradients
    before = copy.copy(cache)
    layer(x[:, :1], cache=cache[0])
    assert_close(layer(x[:, 3:], cache=before[0]), layer(x)[:, 3:])
