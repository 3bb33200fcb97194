"""Our heads are refused in architectures that compute attention themselves; counts; the table in the docs."""

import copy
import importlib
import json
import tomllib

import pytest
import torch
from refusals import refusing
from scripts import ROOT, loaded
from torch import nn

import polyhead as ph
from polyhead.compat import huggingface as hf


@pytest.fixture(scope="module")
def script():
    module = loaded("benchmarks", "architectures.py")
    module.transformers.logging.set_verbosity_error()
    hf.register()
    return module


@pytest.fixture(scope="module")
def found():
    return json.loads((ROOT / "benchmarks" / "architectures.json").read_text())


def test_the_page_is_what_the_script_found(script, found):
    assert script.page(found) == script.PAGE.read_text()
    works = [kind for kind, row in found["rows"].items() if "refused" not in row]
    assert len(works) >= 25
    assert all(found["rows"][kind]["causal"] in ("yes", "-", "looks both ways") for kind in works)
    version = ".".join(found["transformers"].split(".")[:2])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(package.startswith(f"transformers>={version}") for package in extras["hf"])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["qwen3", "bloom", "t5", "mamba"])
def test_the_table_is_what_the_script_finds(script, found, kind):
    assert script.try_one(kind) == found["rows"][kind]


@pytest.mark.parametrize("kind", ["bloom", "xglm", "deberta-v2", "xlnet", "longformer"])
def test_models_that_compute_attention_themselves_are_refused(script, kind):
    """At construction, and by hand where our masks would be added to their scores."""
    model, name = script.build(kind, None), "polyhead_linear"
    line = f"polyhead: {type(model).__name__} must call its attention through transformers' AttentionInterface for "
    with refusing(f"{line}'{name}' but computes it itself"):
        script.build(kind, name)
    arguments = script.inputs(kind)
    before = model(**arguments).logits
    model.set_attn_implementation(name)  # transformers warns and leaves the model as it is
    assert torch.equal(model(**arguments).logits, before)
    model.config._attn_implementation = name
    if kind in ("bloom", "xglm", "longformer"):
        with refusing("polyhead: "):
            model(**arguments)
    else:  # no mask of ours comes in
        assert torch.equal(model(**arguments).logits, before)


@pytest.mark.parametrize("folder", ["git", "sam", "deepseek_ocr2"])
def test_models_whose_layers_use_the_interface_in_part_are_refused(folder):
    kind = {"git": "GitModel", "sam": "SamVisionModel", "deepseek_ocr2": "DeepseekOcr2SamVisionEncoder"}[folder]
    kind = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), kind)
    sizes = dict.fromkeys(("hidden_size", "output_channels"), 32) | {"num_hidden_layers": 1, "num_attention_heads": 4}
    config = kind.config_class(**sizes, **({"vision_config": sizes} if folder == "git" else {}))
    for cls in (kind, type("Derived", (kind,), {"__module__": __name__})):
        with refusing(f"polyhead: {cls.__name__} must call its attention through"):
            cls._from_config(config, attn_implementation="polyhead_hyla")
    model = kind._from_config(config, attn_implementation="eager")
    with refusing(f"polyhead: {kind.__name__} must call its attention through"):
        model.set_attn_implementation("polyhead_hyla")


@pytest.mark.parametrize("kind", ["nllb-moe", "splinter"])
def test_models_without_sdpa_keep_their_masks(script, kind):
    """Their decoders say `is_causal=False`, their encoders nothing: eager attention reads the mask alone."""
    config = script.transformers.CONFIG_MAPPING[kind]
    config = config(**{name: size for name, size in script.SIZES.items() if name in config().to_dict()})
    torch.manual_seed(0)
    model = script.transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    ids, side = torch.arange(3, 11).view(2, 4), "decoder" if config.is_encoder_decoder else "encoder"
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    wanted = model(**given, output_attentions=True)
    captured = [layer for layer in hf.capture(model, given) if layer.name.startswith(side) and ".self" in layer.name]
    codes = wanted.decoder_attentions if config.is_encoder_decoder else wanted.attentions
    torch.testing.assert_close([layer.groups[0].code() for layer in captured], list(codes))
    model.set_attn_implementation("polyhead_softmax")
    torch.testing.assert_close(model(**given).last_hidden_state, wanted.last_hidden_state)


def test_a_model_inside_a_supported_one_is_refused(script):
    transformers = script.transformers
    bert, bloom = script.build("bert").config, script.build("bloom", None).config
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bloom)
    for names in ("polyhead_linear", {"decoder": "polyhead_linear"}):
        with refusing("must call its attention through transformers' AttentionInterface for 'polyhead_linear'"):
            transformers.EncoderDecoderModel._from_config(copy.deepcopy(config), attn_implementation=names)


def test_a_name_for_one_part_of_a_composed_model(script):
    """`verify` says which layers are ours; no token of the decoder sees a later one."""
    transformers = script.transformers
    bert, gpt2 = script.build("bert").config, script.build("gpt2", None).config
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, gpt2)
    model, ids = transformers.EncoderDecoderModel(config).eval(), torch.arange(3, 9)[None]
    inputs = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    model.set_attn_implementation({"decoder": "polyhead_hyla"})
    layers = hf.verify(model, inputs).layers
    assert len(layers) == 6
    of_kinds = {layer.kind: (layer.ours, layer.heads) for layer in layers}
    assert of_kinds == {"BertAttention": (False, "its own"), "GPT2Attention": (True, "polyhead_hyla")}
    changed = {**inputs, "decoder_input_ids": inputs["decoder_input_ids"].clone()}
    changed["decoder_input_ids"][:, -1] += 1
    change = (model(**inputs).logits - model(**changed).logits).abs().amax((0, 2))
    assert change[-1] > 1e-4
    assert change[:-1].max() < 1e-6


class Silent(nn.Module):
    def forward(self, hidden_states, **_):
        return hidden_states, None


def test_verify_refuses_a_layer_that_computes_attention_itself(script):
    """A Llama's class says that it uses the interface, but one of its layers does not."""
    model = script.build("llama", "polyhead_hyla")
    model.model.layers[1].self_attn.__class__ = type("SilentAttention", (Silent,), {})
    with refusing("model.layers.1.self_attn (SilentAttention) must call 'polyhead_hyla' but computes it itself"):
        hf.verify(model)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Mixer", (Silent,), {})
    with refusing("polyhead: LlamaForCausalLM has 'polyhead_hyla' but none of its layers calls it"):
        hf.verify(model)


def test_verify_counts_calls(script):
    """A swapped model is in its docstring."""
    shared = script.build("albert", "polyhead_hyla")  # one layer that is called twice
    assert [(x.calls, x.heads, x.ours) for x in hf.verify(shared).layers] == [(2, "polyhead_hyla", True)]
    plain = hf.verify(script.build("bert"))
    assert hf.verify(script.build("bert"), torch.arange(3, 9)[None]) == plain  # the main input alone
    assert [(x.calls, x.heads, x.ours) for x in plain.layers] == [(1, "its own", False)] * 2
    assert repr(plain).splitlines()[0] == "BertForMaskedLM: 0 of 2 attention layers are ours"
    own = ph.Transformer(ph.TransformerConfig(ph.Tokens(9), ph.Logits(9), dim=8, layers=2, heads=ph.Hyla(2)))
    assert [(x.heads, x.ours) for x in hf.verify(own, inputs=torch.ones(1, 3, dtype=torch.long)).layers] == [
        ("HylaHeads", True)
    ] * 2
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    images = script.transformers.BeitModel(script.transformers.BeitConfig(**sizes, intermediate_size=8))
    assert len(hf.verify(images.bfloat16()).layers) == 1  # a model that does not cast images
    dropping, before = script.build("bert").train(), torch.get_rng_state()
    hf.verify(dropping)
    assert dropping.training
    assert torch.equal(torch.get_rng_state(), before)  # a pass without dropout
    assert not any(module._forward_hooks for module in dropping.modules())
    with refusing("verify: Transformer must be given inputs by name"):
        hf.verify(own)
