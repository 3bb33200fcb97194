"""Architectures that compute attention themselves are refused; `verify` says which layers are ours."""

import importlib

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


@pytest.mark.parametrize(
    ("folder", "class_name"),
    [("git", "GitModel"), ("sam", "SamVisionModel"), ("deepseek_ocr2", "DeepseekOcr2SamVisionEncoder")],
)
def test_models_whose_layers_use_the_interface_in_part_are_refused(folder, class_name):
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    model_class = getattr(module, class_name)
    sizes = dict.fromkeys(("hidden_size", "output_channels"), 32) | {"num_hidden_layers": 1, "num_attention_heads": 4}
    config = model_class.config_class(**sizes, **({"vision_config": sizes} if folder == "git" else {}))
    for cls in (model_class, type("Derived", (model_class,), {"__module__": __name__})):
        with refusing(f"polyhead: {cls.__name__} must call its attention through"):
            cls._from_config(config, attn_implementation="polyhead_hyla")
    model = model_class._from_config(config, attn_implementation="eager")
    with refusing(f"polyhead: {class_name} must call its attention through"):
        model.set_attn_implementation("polyhead_hyla")


def test_models_without_sdpa_keep_their_masks():
    """Eager attention reads the mask alone, whatever `is_causal` says."""
    torch.manual_seed(0)
    config = transformers.SplinterConfig(**HF_BERT)
    model = transformers.SplinterModel._from_config(config, attn_implementation="eager").eval()
    ids = tokens()
    expected = model(ids, output_attentions=True)
    captured = [layer for layer in hf.capture(model, ids) if ".self" in layer.name]
    torch.testing.assert_close([layer.groups[0].code() for layer in captured], list(expected.attentions))
    model.set_attn_implementation("polyhead_softmax")
    torch.testing.assert_close(model(ids).last_hidden_state, expected.last_hidden_state)


def test_a_name_for_one_part_of_a_composed_model():
    """`verify` says which layers are ours; no token of the decoder sees a later one."""
    gpt = transformers.GPT2Config(vocab_size=COUNT, n_embd=24, n_layer=2, n_head=4)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert().config, gpt)
    model, ids = transformers.EncoderDecoderModel(config).eval(), tokens(1, 6)
    inputs = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    model.set_attn_implementation({"decoder": "polyhead_hyla"})
    layers = hf.verify(model, inputs)
    assert len(layers) == 6
    for name, heads in layers.items():
        assert heads == ("its own" if name.startswith("encoder") else "polyhead_hyla")
    changed = {**inputs, "decoder_input_ids": inputs["decoder_input_ids"].clone()}
    changed["decoder_input_ids"][:, -1] += 1
    change = (model(**inputs).logits - model(**changed).logits).abs().amax((0, 2))
    assert change[-1] > 1e-4
    assert change[:-1].max() < 1e-6


class Silent(nn.Module):
    def forward(self, hidden_states, **_):
        return hidden_states, None


def test_verify_refuses_a_layer_that_computes_attention_itself():
    """A Llama's class says that it uses the interface, but one of its layers does not."""
    model, before = foreign("polyhead_hyla"), torch.get_rng_state()
    assert list(hf.verify(model.train()).values()) == ["polyhead_hyla"] * 2
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    model.model.layers[1].self_attn.__class__ = type("SilentAttention", (Silent,), {})
    with refusing("model.layers.1.self_attn (SilentAttention) must call 'polyhead_hyla' but computes it itself"):
        hf.verify(model)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Mixer", (Silent,), {})
    with refusing("polyhead: LlamaForCausalLM has 'polyhead_hyla' but none of its layers calls it"):
        hf.verify(model)


def test_verify_refuses_in_one_line_a_model_that_cannot_read_four_tokens():
    """An encoder of images, with its pixels given, is read."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    model = transformers.ViTModel._from_config(config, attn_implementation="polyhead_hyla").eval()
    with refusing("verify: ViTModel needs other inputs than four tokens"):
        hf.verify(model)
    assert list(hf.verify(model, pixel_values=torch.randn(1, 3, 8, 8)).values()) == ["polyhead_hyla"] * 2
