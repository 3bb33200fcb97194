"""`hf.verify` of models with two inputs, such as CLIP: all their layers, or one line."""

import pytest
from refusals import refusing
from tiny_transformers import hf, transformers

TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
VISION = {**TEXT, "image_size": 8, "patch_size": 4}
LAYERS = {"CLIP": 2, "Siglip": 3, "AltCLIP": 2, "Blip": 2, "Owlv2": 2}  # SigLIP pools by attention


def model_of(name):
    config = getattr(transformers, f"{name}Config")(text_config=TEXT, vision_config=VISION, projection_dim=8)
    return getattr(transformers, f"{name}Model")(config)


@pytest.mark.parametrize("name", LAYERS)
def test_texts_and_images_are_made_for_a_model_that_reads_both(name):
    assert len(hf.verify(model_of(name)).layers) == LAYERS[name]


def test_heads_by_name_are_counted_in_both_parts():
    model = model_of("CLIP")
    model.set_attn_implementation("polyhead_hyla")
    assert [layer.heads for layer in hf.verify(model).layers] == ["polyhead_hyla"] * 2


def test_a_model_of_other_inputs_is_one_line():
    with refusing("verify: Siglip2Model must be given inputs by name ("):
        hf.verify(model_of("Siglip2"))
