"""Pooled heads with one network for a whole sequence: the oracle, and what would hide queries is refused."""

import itertools

import oracle
import pytest
import torch
from refusals import refusing
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import LayerCache
from polyhead.spec import ACTS, NORMALISE, POOLS

CASES = list(itertools.product(POOLS, ((4, 4), (5, 3), (1, 4)), (None, "rows")))
READS_ALL = "network='sequence' reads all queries"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_the_oracle_with_its_gradients(problem, number):
    pool, (t, s), mask = CASES[number]
    bias = (None, "offset", "per_sample")[number % 3]
    qkv, options = problem(t, s, bias=bias, mask=mask, keep=number % 2 == 0, g=(1, 2, 4)[number % 3])
    options |= {"normalise": NORMALISE[number % 5], "act": ACTS[number % 5], "pool": pool, "network": "sequence"}
    out = ph.ops.pooled_attention(*qkv, **options)
    expected = oracle.answer("pooled", dict(zip("qkv", qkv, strict=True)), options)
    assert_close(out, expected, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad(y.square().sum() + y.sum(), qkv) for y in (out, expected))
    assert_close(*gradients, rtol=1e-9, atol=1e-9)
    assert mask != "rows" or (out[0, t // 2] == 0).all()


def test_a_padded_batch_equals_its_sequences_one_by_one():
    """A mask with rows for queries, too: padding is neither read nor counted."""
    q, k, v = torch.randn(3, 2, 5, 4, 3, dtype=torch.float64)
    is_real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    mask = (is_real[:, :, None] & is_real[:, None])[:, None]
    out = ph.ops.pooled_attention(q, k, v, mask=mask, network="sequence")
    unpadded = ph.ops.pooled_attention(q[1:, :3], k[1:, :3], v[1:, :3], network="sequence")
    assert_close(out[1:, :3], unpadded)
    assert (out[1, 3:] == 0).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"causal": True}, f"{READS_ALL}, so causal must be False"),
        ({"window": 2}, f"{READS_ALL}, so window must be None"),
        ({"cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32)}, f"{READS_ALL}, so cu_seqlens must be None: give"),
        ({"mask": torch.ones(1, 1, 1, 4, dtype=torch.bool)}, f"{READS_ALL}, so mask needs a row (t s) for each query"),
        ({"impl": "blocked"}, "impl 'blocked' has some queries in a tile"),
    ],
)
def test_what_would_hide_queries_is_refused(options, reason):
    q, k, v = torch.randn(3, 1, 4, 2, 3)
    with refusing(f"pooled_attention: {reason}"):
        ph.ops.pooled_attention(q, k, v, network="sequence", **options)


def test_layers_and_models_with_an_order_are_refused():
    heads, ends = ph.Pooled(2, network="sequence"), (ph.Tokens(5), ph.Logits(5))
    for order in ({"causal": True}, {"window": 2}):
        with refusing(f"MultiHeadAttention: {READS_ALL}: give no causal and no window"):
            ph.MultiHeadAttention(8, heads, **order)
        with refusing(f"TransformerConfig: {READS_ALL}: give no causal and no window"):
            ph.TransformerConfig(*ends, dim=8, heads=heads, **order)
    encoder = ph.TransformerConfig(*ends, dim=8)
    with refusing(f"TransformerConfig: {READS_ALL}: give no causal and no window"):
        ph.TransformerConfig(*ends, dim=8, causal=True, encoder=encoder, cross_heads=heads)
    layer = ph.MultiHeadAttention(8, heads)
    with refusing(f"MultiHeadAttention: {READS_ALL} at once, so it takes no cache"):
        layer(torch.randn(1, 3, 8), torch.randn(1, 2, 8), cache=LayerCache())


@pytest.mark.parametrize("is_cross", [False, True])
def test_the_tail_of_a_model_reads_all_queries(is_cross):
    sequence = ph.Pooled(2, network="sequence")
    settings = {"layers": 1, "heads": ph.Softmax(2), "positions": ph.Learned()}
    settings["cross_heads" if is_cross else "heads"] = sequence
    if is_cross:
        settings["encoder"] = ph.TransformerConfig(ph.Tokens(5), ph.Logits(5), dim=8)
    model = ph.Transformer(ph.TransformerConfig(ph.Tokens(5), ph.Logits(5), dim=8, **settings)).eval()
    tokens = torch.tensor([[0, 1, 2, 3, 4]])
    source = {"source": tokens} if is_cross else {}
    assert_close(model(tokens, tail=2, **source), model(tokens, **source)[:, -2:])
