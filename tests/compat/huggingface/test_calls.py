"""Architectures that compute attention themselves are refused; `verify` says which layers are ours."""

import pytest
import torch
from refusals import refusing
from tiny_transformers import COUNT, SMALL, foreign, hf, tokens, transformers
from torch import nn

HF_BERT = {key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "eos_token_id")}


def bert(**options):
    return transformers.BertModel(transformers.BertConfig(**HF_BERT, **options)).eval()


@pytest.mark.parametrize("kind", ["bloom", "xglm", "falcon"])
def test_models_that_compute_attention_themselves_are_refused(kind):
    with refusing("must call its attention through transformers' AttentionInterface for 'polyhead_linear'"):
        foreign("polyhead_linear", kind)


def test_a_type_that_is_not_checked_is_refused_until_it_is_added(monkeypatch):
    """Splinter does not support SDPA, so what a call without a mask means is not known."""
    torch.manual_seed(0)
    model = transformers.SplinterModel(transformers.SplinterConfig(**HF_BERT)).eval()
    with refusing("polyhead: SplinterModel must call its attention through"):
        model.set_attn_implementation("polyhead_hyla")
    with refusing("capture: SplinterModel must support SDPA"):
        hf.capture(model, tokens())
    monkeypatch.setattr(hf.calls, "CHECKED", {*hf.CHECKED, "splinter"})
    model.set_attn_implementation("polyhead_hyla")


def test_a_name_for_one_part_of_a_composed_model():
    """`verify` says which layers are ours; no token of the decoder sees a later one."""
    gpt = transformers.GPT2Config(vocab_size=COUNT, n_embd=24, n_layer=2, n_head=4)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert().config, gpt)
    model, ids = transformers.EncoderDecoderModel(config).eval(), tokens(1, 6)
    inputs = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    model.set_attn_implementation({"decoder": "polyhead_hyla"})
    layers = hf.verify(model, **inputs)
    assert list(layers.values()) == ["polyhead_hyla"] * 4
    assert all(name.startswith("decoder") for name in layers)
    changed = {**inputs, "decoder_input_ids": inputs["decoder_input_ids"].clone()}
    changed["decoder_input_ids"][:, -1] += 1
    change = (model(**inputs).logits - model(**changed).logits).abs().amax((0, 2))
    assert change[-1] > 1e-4
    assert change[:-1].max() < 1e-6


class Silent(nn.Module):
    def forward(self, hidden_states, **_):
        return hidden_states, None


def test_verify_shows_a_layer_that_computes_attention_itself():
    """A Llama's type is known to use the interface, but one of its layers does not."""
    model, before = foreign("polyhead_hyla"), torch.get_rng_state()
    assert list(hf.verify(model.train()).values()) == ["polyhead_hyla"] * 2
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    model.model.layers[1].self_attn.__class__ = Silent
    assert hf.verify(model) == {"model.layers.0.self_attn": "polyhead_hyla"}
    model.model.layers[0].self_attn.__class__ = Silent
    with refusing("polyhead: LlamaForCausalLM has 'polyhead_hyla' but none of its layers calls it"):
        hf.verify(model)


def test_verify_reads_the_inputs_of_an_encoder_of_images():
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    model = transformers.ViTModel._from_config(config, attn_implementation="polyhead_hyla").eval()
    assert list(hf.verify(model, pixel_values=torch.randn(1, 3, 8, 8)).values()) == ["polyhead_hyla"] * 2
