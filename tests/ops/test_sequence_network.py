"""Pooled heads with one network for a whole sequence: the oracle, gradients, and what would hide queries is refused."""

import itertools

import oracle
import pytest
import torch
from refusals import refusing
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import LayerCache
from polyhead.ops.call import AttentionCall
from polyhead.ops.dispatch import choose
from polyhead.ops.pooled.op import POOLED, reference
from polyhead.spec import ACTS, NORMALISE, POOLS

CASES = list(itertools.product(POOLS, ((4, 4), (5, 3), (1, 4)), (None, "rows")))
READS_ALL = "network='sequence' reads all queries"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_the_oracle_with_finite_gradients(problem, number):
    pool, (t, s), mask = CASES[number]
    bias = (None, "offset", "per_sample")[number % 3]
    qkv, options = problem(t, s, bias=bias, mask=mask, keep=number % 2 == 0, g=(1, 2, 4)[number % 3])
    options |= {"normalise": NORMALISE[number % 5], "act": ACTS[number % 5], "pool": pool, "network": "sequence"}
    out = ph.ops.pooled_attention(*qkv, **options)
    assert_close(
        out.detach(),
        oracle.answer("pooled", dict(zip("qkv", qkv, strict=True)), options).detach(),
        rtol=1e-9,
        atol=1e-9,
    )
    gradients = torch.autograd.grad(out.square().sum() + out.sum(), qkv)
    assert all(gradient.isfinite().all() for gradient in gradients)
    if mask == "rows":
        assert (out[0, t // 2] == 0).all()
        assert (gradients[0][0, t // 2] == 0).all()


def test_gradients_equal_finite_differences(problem):
    qkv, options = problem(3, 4, bias="offset", mask="rows")

    def run(*tensors):
        return ph.ops.pooled_attention(*tensors, **options, pool="mean", network="sequence")

    assert torch.autograd.gradcheck(run, qkv, fast_mode=True)


def test_jax_gives_the_same(problem):
    jax = pytest.importorskip("jax")
    from polyhead import jaxside

    for pool, mask in itertools.product(POOLS, (None, "rows")):
        qkv, options = problem(5, 5, mask=mask, keep=True, dtype=torch.float32)
        expected = ph.ops.pooled_attention(*qkv, **options, pool=pool, network="sequence")
        arrays = {}
        for name, value in options.items():
            arrays[name] = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        q, k, v = (x.detach().numpy() for x in qkv)
        out = jax.jit(
            lambda q, k, v, how=arrays, pool=pool: jaxside.pooled_attention(
                q, k, v, **how, pool=pool, network="sequence"
            )
        )(q, k, v)
        assert_close(torch.tensor(jax.device_get(out)), expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_padded_batch_equals_its_sequences_one_by_one():
    """A mask with rows for queries, too: padding is neither read nor counted."""
    q, k, v = torch.randn(3, 2, 5, 4, 3, dtype=torch.float64)
    is_real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    mask = (is_real[:, :, None] & is_real[:, None])[:, None]
    out = ph.ops.pooled_attention(q, k, v, mask=mask, network="sequence")
    alone = ph.ops.pooled_attention(q[1:, :3], k[1:, :3], v[1:, :3], network="sequence")
    assert_close(out[1:, :3], alone)
    assert (out[1, 3:] == 0).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"causal": True}, "causal must be False"),
        ({"window": 2}, "window must be None"),
        ({"cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32)}, "cu_seqlens must be None: give packed sequences"),
        ({"mask": torch.ones(1, 1, 1, 4, dtype=torch.bool)}, "mask needs a row (t s) for each query"),
    ],
)
def test_what_would_hide_queries_is_refused(options, reason):
    q, k, v = torch.randn(3, 1, 4, 2, 3)
    with refusing(f"pooled_attention: {READS_ALL}, so {reason}"):
        ph.ops.pooled_attention(q, k, v, network="sequence", **options)


def test_tiles_are_refused_and_never_chosen():
    q, k, v = torch.randn(3, 1, 4, 2, 3)
    with refusing("pooled_attention: impl 'blocked' has some queries in a tile"):
        ph.ops.pooled_attention(q, k, v, network="sequence", impl="blocked")
    large = torch.zeros(1, 1, 1, 1).expand(3, 4096, 1, 1)
    call = AttentionCall(large, large, large, normalise="identity", pool="max", network="sequence")
    assert choose(POOLED, call) is reference


def test_layers_and_models_with_an_order_are_refused():
    heads = ph.Pooled(2, network="sequence")
    for order in ({"causal": True}, {"window": 2}):
        with refusing(f"MultiHeadAttention: {READS_ALL}: give no causal and no window"):
            ph.MultiHeadAttention(8, heads, **order)
        with refusing(f"TransformerConfig: {READS_ALL}: give no causal and no window"):
            ph.TransformerConfig(ph.Tokens(5), ph.Logits(5), dim=8, heads=heads, **order)
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


def test_a_causal_decoder_does_not_read_its_encoder_through_later_queries():
    encoder = ph.TransformerConfig(ph.Tokens(5), ph.Logits(5), dim=8)
    with refusing(f"TransformerConfig: {READS_ALL}: give no causal and no window"):
        ph.TransformerConfig(
            ph.Tokens(5),
            ph.Logits(5),
            dim=8,
            causal=True,
            encoder=encoder,
            cross_heads=ph.Pooled(2, network="sequence"),
        )
