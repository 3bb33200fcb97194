"""Gemma 2, GPT-OSS and Qwen3-Next: our names, heads and taps with their soft cap, sinks and gate."""

import pytest
import torch
import torch.nn.functional as F
from tiny_transformers import F64, foreign, hf, stepwise, tokens, transformers
from torch.testing import assert_close

import polyhead as ph
from polyhead.analysis import codes

KINDS = {
    "gemma2": {"head_dim": 6, "attn_logit_softcapping": 2.0, "sliding_window": 3},
    "gpt_oss": {"head_dim": 6, "sliding_window": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {"head_dim": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
KINDS["qwen3_next"] |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS["qwen3_next"] |= {"shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
KINDS["qwen3_next"] |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
EAGER = {"experts_implementation": "eager"}
NAMED = ("polyhead_softmax", "polyhead_linear_rms", "polyhead_hyla")


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Their eager attention rounds the code to float32; here it stays in float64."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def make(kind, name="eager"):
    """A model of this kind, whose experts compute in float64 as well."""
    model = foreign(name, kind, **KINDS[kind])
    if kind != "gemma2":
        model.set_experts_implementation("eager")
    return model


def test_softmax_by_name_is_their_attention(kind):
    """Logits and gradients, those of the sinks too; with a cache as well."""
    ids, results = tokens(t=9), []
    for name in ("eager", "polyhead_softmax"):
        model = make(kind, name)
        logits = model(ids).logits
        gradients = torch.autograd.grad(logits.log_softmax(-1)[:, 3].mean(), model.parameters())
        steps = stepwise(model, ids, transformers.DynamicCache(config=model.config))
        results.append((logits, steps, gradients))
    assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMED)
def test_names_work_with_a_cache(kind, name):
    model, ids = make(kind, name), tokens(t=9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    steps = stepwise(model, ids, transformers.DynamicCache(config=model.config))
    tolerance = 1e-4 if kind == "qwen3_next" else 1e-9  # its linear layers compute in float32
    assert_close(steps, expected, rtol=tolerance, atol=tolerance)
    assert list(hf.verify(model, ids).values()).count(name) == (1 if kind == "qwen3_next" else 2)


def test_swapped_softmax_heads_have_the_cap_and_the_sinks(kind, tmp_path):
    """Layers that keep their attention do, too; and the model is saved and loaded with its heads."""
    ids = tokens()
    expected = make(kind)(ids).logits
    model = hf.swap_heads(make(kind), [1], [ph.Softmax(2), ph.Softmax(2)])
    assert_close(model(ids).logits, expected, rtol=1e-9, atol=1e-9)

    model = hf.swap_heads(make(kind), [1], [ph.Softmax(2), ph.Hyla(2)])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=F64, **({} if kind == "gemma2" else EAGER))
    assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)  # loaded angles are in float32


def test_codes_are_their_attention_weights(kind):
    model, ids = make(kind), tokens()
    weights = model(ids, output_attentions=True).attentions[-1]
    taps = hf.capture(model, ids)
    assert_close(taps[-1].groups[0].code(), weights, rtol=1e-9, atol=1e-9)
    assert_close(codes(taps[-1], -1, 2), weights[:, :, -1, 2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "heads"), [("gemma2", ph.Softmax(4, softcap=50.0)), ("gpt_oss", ph.Softmax(4, sinks=True))]
)
def test_heads_with_what_the_model_has_already_are_refused(kind, heads):
    model = hf.swap_heads(make(kind), [1], heads)
    with pytest.raises(ValueError, match=r"^Softmax: the model has (softcap|sinks) of its own, so its heads must have"):
        model(tokens(1, 4))
