"""Codes of randomly initialised Hugging Face models are their eager attention weights."""

import pathlib
import runpy
from unittest import mock

import pytest
import torch
from refusals import refusing
from some import some
from tiny_transformers import CACHE, COUNT, SMALL as LLAMA, drawn, tokens, transformers
from torch.testing import assert_close

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
    arguments = {"input_ids": ids} if padding is None else {"input_ids": ids, "attention_mask": mask}
    return {**arguments, "decoder_input_ids": ids[:, :5]} if name == "t5" else arguments


def attentions(model, arguments):
    """The probabilities of the model's own eager attention, by layer: T5's encoder, decoder and cross-attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**arguments, output_attentions=True)
    model.set_attn_implementation("sdpa")
    if "encoder_attentions" in out:
        return [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
    return out.attentions


@pytest.mark.parametrize("padding", [None, "right"], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_codes_are_the_models_own(name, padding):
    model, arguments = make(name), inputs(name, padding)
    taps = capture(model, **arguments)
    expected = attentions(model, arguments)
    assert len(taps) == len(expected) == (3 if name == "t5" else 2)
    for layer, weights in zip(taps, expected, strict=True):
        assert_close(layer.groups[0].code(), weights, rtol=EXACT[name], atol=EXACT[name])
        pairs = [0, 3, -1, 4], [0, 1, 2, -1]
        of_pairs = weights[:, :, pairs[0], pairs[1]].transpose(1, 2)
        assert_close(codes(layer, *pairs), of_pairs, rtol=EXACT[name], atol=EXACT[name])
    with refusing("must be one linear map of known weights but are not"):
        value_network(taps[0], -1, -1)


def test_padding_on_the_left_has_no_code():
    """Real tokens have the code that they have alone."""
    model, arguments = make("llama"), inputs("llama", "left")
    unpadded = capture(model, arguments["input_ids"][:1, 3:])
    for layer, expected in some(zip(capture(model, **arguments), unpadded, strict=True)):
        code = layer.groups[0].code()[0]
        assert (code[..., :3] == 0).all()
        assert (code[:, :3] == 0).all()
        assert_close(code[:, 3:, 3:], expected.groups[0].code()[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("t", [2, 5])
def test_a_layer_alone_is_causal_without_a_mask(t):
    attention, x = make("gpt2").transformer.h[0].attn, torch.randn(2, t, 24, dtype=torch.float64)
    (taps,) = capture(attention, hidden_states=x)
    with torch.no_grad():
        assert_close(attention.c_proj(taps.groups[0].output.flatten(2)), attention(x)[0], rtol=1e-9, atol=1e-9)


class Classifier(transformers.PreTrainedModel):
    """A user's model around a Llama; such a class says nothing of SDPA."""

    config_class = transformers.LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.post_init()

    def forward(self, input_ids):
        return self.model(input_ids).last_hidden_state[:, -1]


def test_a_users_model_is_causal():
    for layer in some(capture(Classifier(transformers.LlamaConfig(**MODELS["llama"][2])).eval(), tokens())):
        assert layer.groups[0].code().triu(1).abs().max() == 0


@torch.no_grad()
def test_capture_changes_nothing_even_after_an_error():
    model, arguments = make("gpt2"), inputs("gpt2")
    before, config = model(**arguments).logits, model.config.to_dict()
    model.train()
    model.transformer.h[0].ln_1.eval()
    modes = [m.training for m in model.modules()]
    first, second = (capture(model, **arguments)[1].groups[0].q for _ in range(2))
    assert torch.equal(first, second)  # no dropout
    broken = mock.patch.object(model.transformer.h[1].attn, "forward", side_effect=KeyError("broken"))
    with broken, pytest.raises(KeyError):
        capture(model, **arguments)
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == config
    assert torch.equal(model.eval()(**arguments).logits, before)


def test_inputs_by_position_in_inference_mode():
    model, arguments = make("gpt2"), inputs("gpt2")
    with torch.inference_mode():
        taps = capture(model, arguments["input_ids"], attention_mask=arguments["attention_mask"])
    assert torch.equal(capture(model, **arguments)[1].groups[0].q, taps[1].groups[0].q)


def test_keys_from_a_cache_have_codes():
    model, arguments = make("llama"), inputs("llama", None)
    with torch.no_grad():
        past = model(arguments["input_ids"][:, :5], use_cache=True)[CACHE]
    full_sequence = capture(model, **arguments)
    taps = capture(model, arguments["input_ids"][:, 5:], **{CACHE: past})
    assert taps[1].groups[0].k.shape == (2, 7, 2, 6)
    assert_close(codes(taps[1], -1, 2), codes(full_sequence[1], -1, 2), rtol=1e-9, atol=1e-9)


def test_the_example_runs(tmp_path):
    example = runpy.run_path(str(pathlib.Path(__file__).parents[3] / "examples" / "foreign_model.py"))
    rows = example["main"](tmp_path / "codes.png", sequences=300)
    assert [(row["model"], row["layer"]) for row in rows][1:3] == [("GPT-2", 1), ("nn.TransformerEncoder", 0)]
    assert all(row["f1"] > row["chance"] + 0.3 for row in rows)
    assert (tmp_path / "codes.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(("kind", "line"), [("bloom", "BloomModel must support SDPA"), ("linear", "Linear must call")])
def test_other_attention_is_one_clear_line(kind, line):
    model = torch.nn.Linear(7, 2) if kind == "linear" else make(kind, torch.float32)
    with refusing(f"capture: {line}"):
        capture(model, torch.ones(1, 7) if kind == "linear" else tokens())
