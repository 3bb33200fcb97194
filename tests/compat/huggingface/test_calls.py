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
from polyhead.compat.huggingface.calls import guard


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
    assert f"transformers>={version}" in extras["hf"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["qwen3", "bloom", "t5", "mamba"])
def test_the_table_is_what_the_script_finds(script, found, kind):
    assert script.try_one(kind) == found["rows"][kind]


@pytest.mark.parametrize("kind", ["bloom", "codegen", "xglm", "deberta-v2", "xlnet", "longformer"])
def test_models_that_compute_attention_themselves_are_refused(script, kind):
    """At construction, by `set_attn_implementation`, and by hand, where our masks would be added to their scores."""
    model, name = script.build(kind, None), "polyhead_linear"
    line = f"polyhead: {type(model).__name__} must call its attention through transformers' AttentionInterface for "
    for ask in (lambda: script.build(kind, name), lambda: model.set_attn_implementation(name)):
        with refusing(f"{line}'{name}' but computes it itself"):
            ask()
    given = script.inputs(kind)
    before = model(**given).logits
    model.config._attn_implementation = name
    if kind in ("bloom", "codegen", "xglm", "longformer"):
        with refusing("polyhead: "):
            model(**given)
    else:  # no mask of ours comes in
        assert torch.equal(model(**given).logits, before)


@pytest.mark.parametrize(
    ("folder", "kind", "own"),
    [
        ("git", "GitModel", "GitSelfAttention"),
        ("sam", "SamVisionModel", "SamVisionAttention"),
        ("deepseek_ocr2", "DeepseekOcr2SamVisionEncoder", "DeepseekOcr2SamVisionAttention"),
    ],
)
def test_models_that_find_an_attention_class_by_its_name_are_refused(script, folder, kind, own):
    """Their file uses the interface for other layers, so the class is not refused; and those layers may be ours."""
    kind = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), kind)
    sizes = dict.fromkeys(("hidden_size", "output_channels"), 32) | {"num_hidden_layers": 1, "num_attention_heads": 4}
    parts = {"vision_config": sizes} if folder == "git" else {}
    line = f"polyhead: {own} must call its attention through transformers' AttentionInterface for 'polyhead_hyla'"
    for asked in (kind, type("Mine", (kind,), {"__module__": __name__})):
        with refusing(f"{line} but computes it itself"):
            asked._from_config(kind.config_class(**sizes, **parts), attn_implementation="polyhead_hyla")
    kind._from_config(kind.config_class(**sizes, **parts), attn_implementation="eager")
    for part in parts:
        model = kind._from_config(kind.config_class(**sizes, **parts), attn_implementation={part: "polyhead_hyla"})
        given = {"input_ids": torch.arange(3, 7)[None], "pixel_values": torch.randn(1, 3, 224, 224)}
        assert {x.heads for x in hf.verify(model, given).layers if x.ours} == {"polyhead_hyla"}


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


def composed(script, inner):
    """A supported outer class, the part of its configuration that holds `inner`, and inputs."""
    transformers, own = script.transformers, script.build(inner, None).config
    ids = {"input_ids": torch.arange(3, 9)[None]}
    if inner == "codegen":
        seen = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        image = transformers.CLIPVisionConfig(**seen, image_size=16, patch_size=8)
        config = transformers.LlavaConfig(vision_config=image, text_config=own, image_token_index=2)
        return transformers.LlavaForConditionalGeneration, config, "text_config", ids
    ids["decoder_input_ids"] = ids["input_ids"].flip(1)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(script.build("bert").config, own)
    return transformers.EncoderDecoderModel, config, "decoder", ids


@pytest.mark.parametrize("inner", ["codegen", "xglm"])
def test_such_a_model_inside_a_supported_one_is_refused(script, inner):
    """By one name for all models or one for that part, as it is made, by `set_attn_implementation`, in its part of the
    configuration, and by hand in a model that is there."""
    kind, config, part, ids = composed(script, inner)
    name, before = "polyhead_linear", kind(copy.deepcopy(config)).eval()
    wanted = before(**ids).logits

    def given_to_its_part():
        held = copy.deepcopy(config)
        getattr(held, part)._attn_implementation = name
        return kind(held)

    ways = [
        *(lambda n=n: kind._from_config(copy.deepcopy(config), attn_implementation=n) for n in (name, {part: name})),
        *(lambda n=n: before.set_attn_implementation(n) for n in (name, {part: name}, {"": "eager", part: name})),
        given_to_its_part,
    ]
    for way in ways:
        with pytest.raises(ValueError, match=rf"^polyhead: \w+ must call its attention .* for '{name}' but computes"):
            way()
    assert torch.equal(before(**ids).logits, wanted)
    for module in before.modules():
        if isinstance(module, script.transformers.PreTrainedModel) and module is not before:
            module.config._attn_implementation = name
    with refusing("polyhead: "):
        before(**ids)


def test_a_name_for_one_part_of_a_composed_model(script):
    """`verify` says which layers are ours; those of the encoder are as they were, and no token of the decoder sees a
    later one."""
    kind, config, part, ids = composed(script, "gpt2")
    model = kind(config).eval()
    model.set_attn_implementation({part: "polyhead_hyla"})
    layers = hf.verify(model, ids).layers
    assert len(layers) == 6
    found = {x.kind: (x.ours, x.heads) for x in layers}
    assert found == {"BertAttention": (False, "its own"), "GPT2Attention": (True, "polyhead_hyla")}
    changed = {**ids, "decoder_input_ids": ids["decoder_input_ids"].clone()}
    changed["decoder_input_ids"][:, -1] += 1
    moved = (model(**ids).logits - model(**changed).logits).abs().amax((0, 2))
    assert moved[-1] > 1e-4
    assert moved[:-1].max() < 1e-6


@pytest.mark.parametrize("configured", [True, False])
def test_a_layer_that_computes_attention_itself_is_refused_in_the_first_pass(script, configured):
    """A Llama's class says that it uses the interface, but one of its layers does not."""
    model = script.build("llama", "polyhead_hyla")
    silent = model.model.layers[1].self_attn
    silent.__class__ = type("SilentAttention", (Silent,), {})
    if not configured:  # the name is that of the model around it
        del silent.config
    line = "for 'polyhead_hyla' but model.layers.1.self_attn (SilentAttention) computes it itself"
    ids = {"input_ids": torch.arange(4)[None]}
    for look in (lambda: model(**ids), lambda: hf.verify(model), lambda: copy.deepcopy(model)(**ids)):
        with refusing(line):
            look()


def test_attention_by_another_name(script):
    """Such modules are not counted.  If they call our function, all is well; if none does, it is an error."""
    ids = {"input_ids": torch.arange(4)[None]}
    for silent in (False, True):
        model = script.build("llama", "polyhead_hyla")
        for layer in model.model.layers:
            layer.self_attn.__class__ = type("Mixer", (Silent if silent else type(layer.self_attn),), {})
        if silent:
            with refusing("'polyhead_hyla' but none of its layers does"):
                model(**ids)
        else:
            assert torch.equal(model(**ids).logits, script.build("llama", "polyhead_hyla")(**ids).logits)


class Silent(nn.Module):
    def forward(self, hidden_states, **_):
        return hidden_states, None


def test_the_first_pass_leaves_no_hooks(script):
    """Nor does a pass that ends in an error of the model."""
    model = script.build("llama", "polyhead_softmax")
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._forward_hooks_always_called)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[999]]))
    assert all(len(each) == 1 for each in hooks)
    other = copy.deepcopy(model)
    for each in (model, other):
        each(**script.inputs("llama"))
        assert not each._forward_hooks
        assert not each._forward_pre_hooks
        assert not each._forward_hooks_always_called
    assert all(not module._forward_hooks for module in model.model.layers.modules())


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
    dropping, names = script.build("bert").train(), ("get_correct_attn_implementation", "set_attn_implementation")
    before, kind = torch.get_rng_state(), type(dropping)
    hf.verify(dropping)
    assert dropping.training
    assert torch.equal(torch.get_rng_state(), before)  # a look without dropout
    methods = [getattr(kind, name) for name in names]
    guard()
    assert [getattr(kind, name) for name in names] == methods  # asked once, however often
    with refusing("verify: Transformer must be given inputs by name"):
        hf.verify(own)
