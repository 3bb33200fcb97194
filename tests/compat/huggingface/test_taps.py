"""Taps of randomly initialised Hugging Face models equal the models' own attention outputs."""

import pathlib
import runpy

import pytest
import torch
from refusals import refusing
from some import some
from tiny_transformers import CACHE, COUNT, SMALL as LLAMA, drawn, tokens, transformers
from torch import nn
from torch.testing import assert_close
from torch_attention import rebuilt

from polyhead.analysis import codes, value_network
from polyhead.compat.huggingface import capture

SMALL = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "eos_token_id")}
T5 = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
GPT = {"n_embd": 24, "n_layer": 2, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": COUNT, "n_positions": 16, **GPT}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "attention_bias": True}),
    "bert": ("BertModel", "BertConfig", SMALL),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "vocab_size": COUNT}),
    "neox": ("GPTNeoXModel", "GPTNeoXConfig", SMALL),  # its rows are q, k, v of one head, then of the next
    "bloom": ("BloomModel", "BloomConfig", {"vocab_size": COUNT, "hidden_size": 24, "n_layer": 1, "n_head": 4}),
}
EXACT = {"gpt2": 1e-12, "bert": 1e-12, "t5": 1e-6, "llama": 1e-6, "neox": 1e-6}  # three take softmax in float32

ATTENTION = ("GPT2Attention", "LlamaAttention", "BertAttention", "T5Attention", "GPTNeoXAttention")


def make(name, dtype=torch.float64):
    torch.manual_seed(0)
    model, config, options = MODELS[name]
    return drawn(getattr(transformers, model)(getattr(transformers, config)(**options)).to(dtype))


def inputs(name, padding="right"):
    """Two sequences, one of them padded."""
    ids, mask = tokens(), torch.ones(2, 7).long()
    if padding == "right":
        mask[0, 5:] = 0
    elif padding == "left":
        mask[0, :3] = 0
    given = {"input_ids": ids} if padding is None else {"input_ids": ids, "attention_mask": mask}
    return {**given, "decoder_input_ids": ids[:, :5]} if name == "t5" else given


def attentions(model, given):
    """The probabilities of the model's own eager attention, by layer: T5's encoder, decoder and cross-attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**given, output_attentions=True)
    model.set_attn_implementation("sdpa")
    if "encoder_attentions" in out:
        return [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
    return out.attentions


def layer_outputs(model, given):
    """The logits, and the output of every attention layer, in the model's own run."""
    seen = []
    parts = [m for m in model.modules() if type(m).__name__ in ATTENTION]
    hooks = [m.register_forward_hook(lambda m, args, out: seen.append(out[0])) for m in parts]
    with torch.no_grad():
        logits = model(**given)[0]
    for hook in hooks:
        hook.remove()
    return logits, seen


@pytest.mark.parametrize("padding", [None, "right"], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_codes_and_value_networks_are_the_models_own(name, padding):
    model, given = make(name), inputs(name, padding)
    taps = capture(model, given)
    wanted = attentions(model, given)
    logits, outputs = layer_outputs(model, given)
    assert len(taps) == len(wanted) == (3 if name == "t5" else 2)
    for layer, own in zip(taps, wanted, strict=True):
        pairs = [0, 3, -1, 4], [0, 1, 2, -1]
        assert_close(layer.groups[0].code(), own, rtol=EXACT[name], atol=EXACT[name])
        few = own[:, :, pairs[0], pairs[1]].transpose(1, 2)
        assert_close(codes(layer, *pairs), few, rtol=EXACT[name], atol=EXACT[name])
    for i, (layer, output) in enumerate(zip(taps, outputs, strict=True)):
        mine = layer.output
        if name == "bert":  # its attention module adds a residual and a norm
            mine = model.encoder.layer[i].attention.output.LayerNorm(layer.x + layer.output).detach()
        assert_close(mine, output, rtol=1e-9, atol=1e-9)
        rows = torch.stack([rebuilt(layer, b, 4) for b in range(2)])
        assert_close(rows, layer.output[:, 4], rtol=1e-9, atol=1e-9)
        assert layer.x.shape == (2, layer.q.shape[1], 24)
    assert torch.equal(layer_outputs(model, given)[0], logits)


@pytest.mark.parametrize("t", [2, 5])
def test_a_layer_alone_is_causal_without_a_mask(t):
    attention, x = make("gpt2").transformer.h[0].attn, torch.randn(2, t, 24, dtype=torch.float64)
    (taps,) = capture(attention, hidden_states=x)
    with torch.no_grad():
        assert_close(taps.output, attention(x)[0], rtol=1e-9, atol=1e-9)


class Classifier(transformers.PreTrainedModel):
    """A user's model around a Llama; such a class says nothing of SDPA."""

    config_class = transformers.LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.post_init()

    def forward(self, input_ids):
        return self.model(input_ids).last_hidden_state[:, -1]


def test_a_users_model_leaves_others_of_its_configuration_causal():
    options = MODELS["llama"][2]
    user, llama = Classifier(transformers.LlamaConfig(**options)).eval(), make("llama")
    for model in (user, llama):
        for layer in some(capture(model, tokens())):
            assert layer.groups[0].code().triu(1).abs().max() == 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_on_the_left(name):
    """The code of padded keys and queries is 0; the outputs of real tokens are those of the model's own run."""
    model, given = make(name), inputs(name, "left")
    taps = capture(model, given)
    outputs = layer_outputs(model, given)[1]
    for layer, output in some(zip(taps, outputs, strict=True)):
        code = layer.groups[0].code()[0]
        assert (code[..., :3] == 0).all()
        assert (code[:, :3] == 0).all()
        assert_close(layer.output[:, 3:], output[:, 3:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_capture_changes_nothing_even_after_an_error(name, monkeypatch):
    model, given = make(name), inputs(name)
    before, config = layer_outputs(model, given)[0], model.config.to_dict()
    model.train()
    first = next(m for m in model.modules() if type(m) is nn.LayerNorm or "RMSNorm" in type(m).__name__)
    first.eval()
    modes = [m.training for m in model.modules()]

    def restored():
        assert [m.training for m in model.modules()] == modes
        assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        assert model.config._attn_implementation == "sdpa"
        assert model.config.to_dict() == config

    assert torch.equal(capture(model, given)[1].output, capture(model, given)[1].output)  # no dropout
    restored()

    def broken(*_, **__):
        raise KeyError("broken")

    last = [m for m in model.modules() if type(m).__name__ in ATTENTION][-1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", broken)
        with pytest.raises(KeyError):
            capture(model, given)
    restored()
    model.eval()
    assert torch.equal(layer_outputs(model, given)[0], before)


def test_ways_to_give_the_inputs():
    model, given = make("gpt2"), inputs("gpt2")
    wanted = capture(model, given)[1].q
    assert torch.equal(capture(model, given["input_ids"], attention_mask=given["attention_mask"])[1].q, wanted)
    assert torch.equal(capture(model, **given)[1].q, wanted)
    with torch.inference_mode():
        assert torch.equal(capture(model, given)[1].q, wanted)
    assert all(layer.groups[0].w_out is not None for layer in capture(model.half(), given))


@pytest.mark.parametrize(
    ("part", "hook", "what"),
    [
        ("v_proj", lambda module, args, y: 2 * y, "values"),
        ("v_proj", lambda module, args, y: y.mul_(2), "values"),
        ("o_proj", None, "output"),
        ("o_proj", lambda module, args, y: 2 * y, "output"),
        ("o_proj", lambda module, args, y: y.mul_(2), "output"),
    ],
    ids=["another tensor", "in place", "a gate", "another output", "an output in place"],
)
def test_weights_are_unknown_if_another_operation_lies_between(part, hook, what):
    model, given = make("llama"), inputs("llama")
    module = getattr(model.model.layers[1].self_attn, part)
    if hook is None:
        module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    else:
        module.register_forward_hook(hook)
    taps = capture(model, given)
    assert_close(taps[1].groups[0].code(), attentions(model, given)[1], rtol=1e-6, atol=1e-6)
    assert rebuilt(taps[0], 0, 1).shape == (24,)
    line = f"value_network: the {what} of layer model.layers.1.self_attn must be one linear map of known weights"
    with refusing(f"{line} but are not"):
        value_network(taps[1], -1, -1)


def test_keys_from_a_cache_have_codes_but_no_context():
    model, given = make("llama"), inputs("llama", None)
    with torch.no_grad():
        past = model(given["input_ids"][:, :5], use_cache=True)[CACHE]
    whole, taps = capture(model, given), capture(model, given["input_ids"][:, 5:], **{CACHE: past})
    assert taps[1].k.shape == (2, 7, 2, 6)
    assert_close(codes(taps[1], -1, 2), codes(whole[1], -1, 2), rtol=1e-9, atol=1e-9)
    assert taps[1].context is None


def test_the_example_runs(tmp_path):
    example = runpy.run_path(str(pathlib.Path(__file__).parents[3] / "examples" / "foreign_model.py"))
    rows = example["main"](tmp_path / "codes.png", sequences=300)
    assert [(row["model"], row["layer"]) for row in rows][1:3] == [("GPT-2", 1), ("nn.TransformerEncoder", 0)]
    assert all(row["f1"] > row["chance"] + 0.3 for row in rows)
    assert (tmp_path / "codes.png").read_bytes()[1:4] == b"PNG"


def test_other_attention_is_one_clear_line():
    model = make("bloom", torch.float32)
    line = "capture: BloomModel must call its attention through transformers' AttentionInterface but called none"
    with refusing(line):
        capture(model, inputs("bloom"))
    assert model.config._attn_implementation != "polyhead"
