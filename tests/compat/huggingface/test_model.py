"""Our models in transformers: a saved model loads with the same outputs, however it is loaded."""

import dataclasses
import json

import pytest
import torch
from refusals import refusing
from tiny_transformers import hf, ours, tokens, transformers
from torch.testing import assert_close

import polyhead as ph
from polyhead import config as configs
from polyhead.models.transformer import Transformer

AUTO = transformers.AutoModelForCausalLM
OWN = ph.SymbolicAttention(shared=False, count=6)
MODELS = {
    "rotary": {"heads": (ph.Softmax(2), ph.Hyla(2)), "positions": ph.Rotary(), "outputs": ph.Logits(50, tied=True)},
    "sinusoidal": {"heads": (ph.Hyla(2),), "positions": ph.Sinusoidal(), "norm": "rms"},
    "alibi": {"heads": (ph.Linear(2), ph.Softmax(2)), "positions": ph.Alibi(), "norm_order": "post"},
    "buckets": {"heads": (ph.Softmax(2),), "positions": ph.RelativeBias(buckets=8)},
    "learned": {"heads": (ph.Softmax(2), ph.Relational(2, symbols=ph.PositionSymbols())), "positions": ph.Learned()},
    "libraries": {"heads": (ph.Softmax(2), ph.Relational(2, symbols=OWN)), "layers": 3},
    "fixed libraries": {"heads": (ph.Relational(2, symbols=dataclasses.replace(OWN, trainable=False)),)},
    "experts": {"heads": (ph.Softmax(2),), "feedforward": ph.Experts(2, 1, 8), "window": 3},
}
"""Everything that has constants or tables of its own: what loading on the meta device can lose."""


def make(name="rotary", **changes):
    return ours(**{"positions": None, **MODELS[name], **changes})


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens(2, 7) if ids is None else ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_loaded_as_it_was(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    loaded, loading_info = AUTO.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading_info.values())
    assert type(loaded) is hf.PolyheadForCausalLM
    assert not loaded.training
    assert loaded.config.settings == model.config.settings
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.num_parameters() == model.num_parameters()  # what is tied is one parameter again
    torch.manual_seed(0)
    built = Transformer(model.config.settings).eval()
    assert torch.equal(logits(model), built(tokens(2, 7)))  # the library filled nothing


def test_shards_and_half_precision_load_the_same_numbers(tmp_path):
    model = make()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path)), logits(model))
    half = AUTO.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert next(iter(half.model.blocks[0].attention.rotary.values())).table.value.dtype == torch.float32
    assert torch.equal(logits(half), logits(model.bfloat16()))
    half.save_pretrained(tmp_path / "half")
    assert AUTO.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_a_model_with_blocks_on_disk_computes_the_same(tmp_path):
    """Where the caller says so, and where accelerate would have them."""
    pytest.importorskip("accelerate")
    model = make("learned", layers=3)
    model.save_pretrained(tmp_path / "model")
    parts = [f"model.{name}" for name, _ in model.model.named_children()]
    by_module = dict.fromkeys((p for p in parts if p != "model.blocks"), "cpu")
    by_module |= {f"model.blocks.{i}": ("cpu", "disk", "cpu")[i] for i in range(3)}
    for device_map in ("auto", by_module):
        loaded = AUTO.from_pretrained(tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "disk")
        assert_close(logits(loaded, tokens(2, 7).to(loaded.device)).cpu(), logits(model))
    assert loaded.model.blocks[1].attention.out.weight.is_meta


# ----------------------------------------------------------------------------------------------------------- mistakes
def written(folder, change):
    """The folder of a saved model with `change` made to its config.json."""
    make().save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return folder


MISTAKES = {
    "PolyheadConfig: transformer: must be an object": lambda data: data.pop("transformer"),
    "unknown kind 'Os'": lambda data: data["transformer"]["heads"][0].update(kind="Os"),
    "PolyheadConfig: transformer: unknown field": lambda data: data["transformer"].update(kind="Train"),
    "the model must be causal and end in Logits": lambda data: data["transformer"].update(causal=False),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_configuration_that_is_wrong_is_one_clear_line(line, tmp_path):
    folder = written(tmp_path, MISTAKES[line])
    with refusing(line):
        AUTO.from_pretrained(folder)


def test_a_file_without_some_parameters_is_refused(tmp_path):
    model = make()
    state = model.state_dict()
    state.pop("model.norm.weight")
    model.save_pretrained(tmp_path, state_dict=state)
    with refusing("PolyheadForCausalLM: the file must have weight of each "):
        AUTO.from_pretrained(tmp_path)


def test_a_strangers_configuration_runs_no_code(tmp_path):
    """Not even if its `auto_map` names code."""
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    auto = {"AutoConfig": "evil.PolyheadConfig", "AutoModelForCausalLM": "evil.PolyheadForCausalLM"}
    folder = written(tmp_path / "model", lambda data: data.update(auto_map=auto))
    (folder / "evil.py").write_text(code)
    assert type(AUTO.from_pretrained(folder)) is hf.PolyheadForCausalLM
    assert not (tmp_path / "ran").exists()


def test_sizes_are_those_of_the_transformer():
    config = make().config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (50, 16, 2)
    assert (config.num_attention_heads, config.max_position_embeddings, config.tie_word_embeddings) == (4, 24, True)
    assert hf.PolyheadConfig(**config.to_dict()).settings == config.settings
    assert json.loads(config.to_json_string())["transformer"] == configs.to_dict(config.settings)
    assert hf.PolyheadConfig(config.settings, vocab_size=60).vocab_size == 50


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"cache": transformers.DynamicCache()}, "the cache must be a PolyheadCache but is a DynamicCache"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask must be (b s) = (1, 3), the tokens before included, bu"),
    ],
)
def test_inputs_that_are_refused(options, line):
    with refusing(line):
        make()(tokens(1, 3), **options)
