"""Soft cap, sinks and gate of softmax heads: against layers of transformers, and by every implementation."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import polyhead as ph
from polyhead import ops
from polyhead.layers.cache import LayerCache

F64 = torch.float64
WIDTH, HEADS, GROUPS, DIM, TOKENS = 32, 4, 2, 8, 11
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM}
LIMITS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "packed": {"cu_seqlens": torch.tensor([0, 4, 11], dtype=torch.int32)},
    "mask": {"mask": torch.arange(TOKENS) % 3 > 0},
}


def rotation(dtype=F64):
    """Cosines and sines of the positions, as layers of transformers take them."""
    angles = torch.arange(TOKENS, dtype=dtype)[:, None] * 1e4 ** (-torch.arange(0, DIM, 2, dtype=dtype) / DIM)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()


def theirs(kind):
    """An attention layer of transformers in float64, with random weights, and its window."""
    transformers = pytest.importorskip("transformers")
    models = transformers.models
    if kind == "gemma2":
        config = transformers.Gemma2Config(**SIZES, query_pre_attn_scalar=DIM, attn_logit_softcapping=2.0)
        layer = models.gemma2.modeling_gemma2.Gemma2Attention(config, 1)
    elif kind == "gpt_oss":
        config = transformers.GptOssConfig(**SIZES, sliding_window=3)
        layer = models.gpt_oss.modeling_gpt_oss.GptOssAttention(config, 0)
    else:
        config = transformers.Qwen3NextConfig(**SIZES)
        layer = models.qwen3_next.modeling_qwen3_next.Qwen3NextAttention(config, 0)
    config._attn_implementation = "eager"
    layer = layer.to(F64).eval()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer, getattr(layer, "sliding_window", None)


def ours(kind, layer, window):
    """Our layer with the weights of theirs."""
    fields = {"gemma2": {"softcap": 2.0}, "gpt_oss": {"sinks": True}, "qwen3_next": {"gate": True}}[kind]
    heads = ph.Softmax(HEADS, DIM, DIM, kv_heads=GROUPS, **fields)
    has_bias, is_gated = layer.q_proj.bias is not None, kind == "qwen3_next"
    rotary = ph.Rotary(layout="half")
    own = ph.MultiHeadAttention(
        WIDTH, heads, causal=True, positions=rotary, bias=has_bias, window=window, qk_norm=is_gated, dtype=F64
    )
    state, maps = {}, layer.state_dict()
    for part in ("weight", "bias")[: 1 + has_bias]:
        query = maps[f"q_proj.{part}"]
        if is_gated:  # a head's queries, then its gate
            query, gate = (x.flatten(0, 1) for x in query.unflatten(0, (HEADS, 2, DIM)).unbind(1))
            state[f"gates.0.{part}"] = gate
        state[f"qkv.{part}"] = torch.cat((query, maps[f"k_proj.{part}"], maps[f"v_proj.{part}"]))
        state[f"out.{part}"] = maps[f"o_proj.{part}"]
    if kind == "gpt_oss":
        state["groups.0.sinks"] = maps["sinks"]
    if is_gated:
        own.qk_norms = torch.nn.ModuleList((layer.q_norm, layer.k_norm))
    assert not own.load_state_dict(state, strict=False).unexpected_keys
    return own.eval()


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_next"])
def test_layers_of_transformers_compute_the_same(kind, monkeypatch):
    """In float64, in one call and token by token with a cache."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))  # theirs would round to float32
    layer, window = theirs(kind)
    own, x = ours(kind, layer, window), torch.randn(2, TOKENS, WIDTH, dtype=F64)
    is_far = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    hidden = (is_far < 0) | (is_far >= (window or TOKENS))
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=F64).masked_fill(hidden, -torch.inf)
    with torch.no_grad():
        tables = rotation()
        if kind == "gpt_oss":  # it wants each angle once
            tables = tuple(table[..., : DIM // 2] for table in tables)
        expected = layer(x, position_embeddings=tables, attention_mask=mask)[0]
        cache = LayerCache()
        steps = torch.cat([own(x[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, TOKENS))], 1)
        whole = own(x)
    differences = ((whole - expected).abs().max().item(), (steps - expected).abs().max().item())
    print(kind, differences)
    assert max(differences) < 1e-13


@pytest.mark.parametrize("limits", LIMITS)
def test_tiles_and_the_reference_agree(limits):
    """Outputs and gradients, that of the sinks too; where native code and fused kernels would be faster, as well."""
    torch.manual_seed(0)
    b = 1 if limits == "packed" else 2
    leaves = [torch.randn(b, TOKENS, h, DIM, dtype=F64) for h in (HEADS, GROUPS, GROUPS)]
    leaves = [x.requires_grad_() for x in (*leaves, torch.randn(HEADS, dtype=F64))]
    results = []
    for impl in ("reference", "blocked", "auto"):
        q, k, v, sinks = leaves
        y = ops.softmax_attention(q, k, v, softcap=1.5, sinks=sinks, impl=impl, **LIMITS[limits])
        results.append((y, *torch.autograd.grad(y.sin().sum(), leaves)))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["native", "sdpa"])
@pytest.mark.parametrize("extra", [{"softcap": 2.0}, {"sinks": torch.zeros(HEADS)}])
def test_other_implementations_refuse_them(impl, extra):
    q = torch.randn(1, TOKENS, HEADS, DIM)
    with pytest.raises(ValueError, match=f"impl '{impl}' takes no {next(iter(extra))}"):
        ops.softmax_attention(q, q, q, impl=impl, **extra)


def test_a_query_without_a_key_gives_all_its_weight_to_the_sink():
    q = torch.randn(1, 3, HEADS, DIM, requires_grad=True)
    y = ops.softmax_attention(q, q, q, mask=torch.zeros(3, dtype=torch.bool), sinks=torch.zeros(HEADS))
    (gradient,) = torch.autograd.grad(y.sum(), q)
    assert not y.any()
    assert not gradient.any()


def test_converters_to_formats_without_them_refuse():
    from polyhead.compat.haiku import to_haiku

    layer = ph.MultiHeadAttention(WIDTH, ph.Softmax(HEADS, gate=True), bias=True)
    with pytest.raises(ValueError, match="to_haiku: softmax heads must have no softcap, sinks or gate"):
        to_haiku(layer)
