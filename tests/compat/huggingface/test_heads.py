"""Our mechanisms by name in models of transformers: softmax equals SDPA, and results do not depend on the batch."""

import functools

import pytest
import torch
from refusals import refusing
from tiny_transformers import F64, foreign, hf, padded, positions, stepwise, tokens, transformers
from torch import nn
from torch.testing import assert_close

import polyhead as ph

OPS = {
    "polyhead_softmax": ph.ops.softmax_attention,
    "polyhead_linear": ph.ops.linear_attention,
    "polyhead_linear_rms": functools.partial(ph.ops.linear_attention, normalise="rms_heads"),
    "polyhead_hyla": ph.ops.hyla,
    "polyhead_hyla_softmax": functools.partial(ph.ops.hyla, normalise="softmax"),
}


def named(name):
    """The function of that name, and a causal module that calls it."""
    module = nn.Module().train()
    module.is_causal = True
    return functools.partial(transformers.AttentionInterface()[name], module)


@pytest.mark.parametrize("side", [None, "left", "right"], ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "granite", "cohere"])
def test_softmax_is_sdpa(kind, side):
    """Logits at real tokens, and gradients; Mistral with a window, Granite with a scale of its own."""
    options = {"mistral": {"sliding_window": 3}, "granite": {"attention_multiplier": 0.7}}.get(kind, {})
    model = foreign(kind=kind, dtype=torch.float32, head_dim=6, **options)
    ids, mask, _ = padded(side or "right")
    mask = torch.ones_like(mask) if side is None else mask
    results = []
    for name in ("sdpa", "polyhead_softmax"):
        model.set_attn_implementation(name)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        results.append((logits, torch.autograd.grad(logits.float().log_softmax(-1)[:, 3].mean(), model.parameters())))
    assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    model = foreign(name)
    ids, mask, real = padded(side)
    with torch.no_grad():
        unpadded = model(ids[:1]).logits, model(ids[1:, real]).logits
        logits = model(ids, attention_mask=mask).logits
        with_positions = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    # Angles are made in float32, so that other positions are another rounding.
    assert_close((logits[:1], logits[1:, real]), unpadded, rtol=1e-5, atol=1e-5)
    assert_close((with_positions[:1], with_positions[1:, real]), unpadded, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "window"), [*((name, None) for name in OPS), ("polyhead_hyla", 3)])
def test_a_cache_changes_nothing(name, window):
    """With the caches that transformers makes itself."""
    model = foreign(name, **({} if window is None else {"kind": "mistral", "sliding_window": window}))
    ids, config = tokens(t=9), model.config
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for cache in (transformers.DynamicCache(config=config), transformers.StaticCache(config=config, max_cache_len=12)):
        assert_close(stepwise(model, ids, cache), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OPS)
def test_the_function_is_the_op(name):
    """Grouped heads, every kind of mask, a scale, a bias: against the op by its equation."""
    q, k, v = (torch.randn(2, n, h, 6, dtype=F64) for n, h in ((5, 4), (7, 2), (7, 2)))
    mask = torch.rand(2, 1, 5, 7) > 0.4
    bias = torch.randn(2, 4, 5, 7, dtype=F64)
    smallest = torch.finfo(F64).min
    cases = {
        "everything": ({"attention_mask": None, "is_causal": False}, {}),
        "boolean": ({"attention_mask": mask}, {"mask": mask}),
        "longer": ({"attention_mask": torch.cat((mask, ~mask), -1)}, {"mask": mask}),
        "per head": ({"attention_mask": bias > 0}, {"mask": bias > 0}),
        "added": ({"attention_mask": bias.masked_fill(~mask, smallest)}, {"mask": mask, "bias": bias}),
        "position bias": ({"attention_mask": mask, "position_bias": bias}, {"mask": mask, "bias": bias}),
        "scale": ({"attention_mask": mask, "scaling": 0.3}, {"mask": mask, "scale": 0.3}),
    }
    for case, (options, op_options) in cases.items():
        y, weights = named(name)(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        assert weights is None
        expected = OPS[name](q, k, v, impl="reference", **op_options)
        assert_close(y, expected, msg=lambda text, case=case: f"{case}: {text}")


@pytest.mark.parametrize("name", OPS)
def test_dropout_is_of_the_code(name):
    """With unit vectors as values, the output of softmax and linear heads is the code itself."""
    q, k = (torch.randn(1, 2, 8, 8, dtype=F64).abs() for _ in range(2))
    v = torch.eye(8, dtype=F64).expand(1, 2, 8, 8)
    code, _ = named(name)(q, k, v, None, is_causal=False)
    y, _ = named(name)(q, k, v, None, is_causal=False, dropout=0.25)
    if "hyla" not in name:
        is_kept = y != 0
        assert 10 < (~is_kept).sum() < 60
        assert_close(y[is_kept], code[is_kept] / 0.75)
    assert (y - code).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize("name", ["polyhead_softmax", "polyhead_hyla"])
def test_attention_that_is_not_plain_is_one_clear_line(name):
    q = torch.zeros(1, 2, 3, 4)
    for options, line in (
        ({"indices": q}, "must be plain attention but indices changes it"),
        ({"cache": q}, "must be plain attention but cache changes it"),
        ({"attention_mask": torch.ones(1, 3)}, "must be (b h t s) but is (1, 3)"),
        ({"attention_mask": q, "position_bias": q[0]}, "must be (b h t s) but is (2, 3, 4)"),
    ):
        with refusing(f"Module {line}"):
            named(name)(q, q, q, **options)


def test_a_part_of_the_heads_is_refused_as_under_tensor_parallelism():
    q = torch.zeros(1, 2, 3, 4, dtype=F64)
    for model in (foreign("polyhead_hyla"), hf.swap_heads(foreign(), [0], ph.Hyla(4))):
        layer = model.model.layers[0].self_attn
        with refusing("on one device, without tensor parallelism"):
            transformers.AttentionInterface()[model.config._attn_implementation](layer, q, q[:, :1], q[:, :1])


def test_options_that_would_be_ignored_are_refused():
    by_name, swapped = foreign("polyhead_hyla"), hf.swap_heads(foreign(), [1], ph.Hyla(4))
    ids, cu_seqlens = tokens(1, 6), torch.tensor([0, 3, 6], dtype=torch.int32)
    large_numbers = torch.zeros(1, 1, 6, 6, dtype=F64)
    large_numbers.masked_fill_(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e9)
    refusal = "-inf or a Boolean mask hides pairs from HylaHeads, got a mask with -1e+09"
    for model in (by_name, swapped):
        with refusing("needs position_ids that restart in each sequence, not only cu_seq_lens_q"):
            model(ids, cu_seq_lens_q=cu_seqlens)
        with refusing(refusal):
            model(ids, attention_mask=large_numbers)
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = by_name(ids, position_ids=position_ids, cu_seq_lens_q=cu_seqlens, use_cache=False).logits
    assert_close(packed, torch.cat((by_name(ids[:, :3]).logits, by_name(ids[:, 3:]).logits), 1))
