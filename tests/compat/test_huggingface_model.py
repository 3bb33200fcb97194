"""Our models in transformers: a saved model loads with the same outputs, however it is loaded."""

import dataclasses
import json
import math
import os
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from polyhead import config as configs
from polyhead.config import (
    Alibi,
    Classes,
    Experts,
    Hyla,
    Learned,
    Linear,
    Logits,
    Patches,
    PositionSymbols,
    Relational,
    RelativeBias,
    Rotary,
    Sinusoidal,
    Softmax,
    SymbolicAttention,
    Tokens,
    TransformerConfig,
)
from polyhead.models.transformer import Transformer

transformers = pytest.importorskip("transformers")
ours = pytest.importorskip("polyhead.compat.huggingface.model")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

TIED = SymbolicAttention(shared=False, tied=True, count=6)
MODELS = {
    "rotary": {"heads": (Softmax(2), Hyla(2)), "positions": Rotary(), "outputs": Logits(50, tied=True)},
    "sinusoidal": {"heads": (Hyla(2),), "positions": Sinusoidal(), "norm": "rms"},
    "alibi": {"heads": (Linear(2), Softmax(2)), "positions": Alibi(), "norm_order": "post"},
    "buckets": {"heads": (Softmax(2),), "positions": RelativeBias(buckets=8)},
    "learned": {"heads": (Softmax(2), Relational(2, symbols=PositionSymbols())), "positions": Learned()},
    "tied libraries": {"heads": (Softmax(2), Relational(2, symbols=TIED)), "layers": 3},
    "fixed libraries": {"heads": (Relational(2, symbols=dataclasses.replace(TIED, trainable=False)),)},
    "experts": {"heads": (Softmax(2),), "feedforward": Experts(2, 1, 8), "window": 3},
}
"""Everything that has constants or tables of its own: what loading on the meta device can lose."""


def settings(name="rotary", **changes):
    fields = {"outputs": Logits(50), "dim": 16, "layers": 2, "causal": True, "max_length": 24}
    return TransformerConfig(Tokens(50), **{**fields, **MODELS[name], **changes})


def make(name="rotary", **changes):
    torch.manual_seed(0)
    return ours.PolyheadForCausalLM(ours.PolyheadConfig(settings(name, **changes))).eval()


def tokens(*shape):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens(2, 7) if ids is None else ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_comes_back(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    assert type(again) is ours.PolyheadForCausalLM
    assert not again.training
    assert again.config.settings == settings(name)
    assert torch.equal(logits(again), logits(model))
    assert again.num_parameters() == model.num_parameters()  # what is tied is one parameter again
    torch.manual_seed(0)
    assert torch.equal(logits(model), Transformer(settings(name)).eval()(tokens(2, 7)))  # the library filled nothing


def test_the_logits_and_the_tokens_share_their_table(tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.outputs.table.weight is again.get_input_embeddings().weight
    names = [name for name, _ in again.named_parameters()]
    assert all(name.startswith("model.") for name in names)
    assert "model.outputs.table.weight" not in names
    libraries = make("tied libraries")
    libraries.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.blocks[0].symbols[0].library is again.model.blocks[2].symbols[0].library


def test_shards_and_half_precision(tmp_path):
    model = make()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert next(iter(half.model.blocks[0].attention.rotary.values())).table.value.dtype == torch.float32
    assert torch.equal(logits(half), logits(model.bfloat16()))
    half.save_pretrained(tmp_path / "half")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.mark.parametrize("where", ["cpu", "auto"])
def test_device_map(where, tmp_path):
    pytest.importorskip("accelerate")
    model = make()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where)
    assert_close(logits(again, tokens(2, 7).to(again.device)).cpu(), logits(model))


def test_blocks_on_disk(tmp_path):
    pytest.importorskip("accelerate")
    model = make("learned", layers=3)
    model.save_pretrained(tmp_path / "model")
    parts = [f"model.{name}" for name, _ in model.model.named_children()]
    places = dict.fromkeys((p for p in parts if p != "model.blocks"), "cpu")
    places |= {f"model.blocks.{i}": ("cpu", "disk", "cpu")[i] for i in range(3)}
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    )
    assert again.model.blocks[1].attention.out.weight.is_meta
    assert_close(logits(again), logits(model))


def test_what_a_file_lacks_is_filled_by_our_rules(tmp_path):
    model = make("sinusoidal")
    state = model.state_dict()
    del state["model.blocks.1.attention.qkv.weight"], state["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    torch.manual_seed(2)
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert told["missing_keys"] == {"model.blocks.1.attention.qkv.weight", "model.norm.weight"}
    assert (again.model.norm.weight == 1).all()
    new, kept = again.model.blocks[1].attention.qkv.weight, again.model.blocks[0].attention.qkv.weight
    assert 0.5 < new.std() / kept.std() < 2
    assert torch.equal(kept, model.model.blocks[0].attention.qkv.weight)


@pytest.mark.parametrize(("name", "count"), [("rotary", 60), ("buckets", 45), ("buckets", 60)])
def test_another_number_of_tokens(name, count, tmp_path):
    model = make(name)
    before = logits(model, tokens(2, 7) % 40)
    torch.manual_seed(0)
    model.resize_token_embeddings(count, mean_resizing=count == 45)
    assert model.config.vocab_size == model.model.config.outputs.count == count
    after = logits(model, tokens(2, 7) % 40)
    assert after.shape[-1] == count
    assert_close(after[..., :45], before[..., :45])
    assert after.isfinite().all()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, tokens(2, 7) % 40), after)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("preset", ["hyla", "cs336"])
def test_the_loss_begins_near_that_of_knowing_nothing_by_this_door_too(preset, tied):
    """Also after `resize_token_embeddings`, whose new rows are as wide as the preset makes them."""
    torch.manual_seed(0)
    ends = {"inputs": Tokens(256), "outputs": Logits(256, tied=tied)}
    how = dataclasses.replace(settings(dim=64, heads=(Softmax(8),), init=preset), **ends)
    model = transformers.AutoModelForCausalLM.from_config(ours.PolyheadConfig(how)).eval()
    old = [x.weight.std().item() for x in (model.model.inputs.table, logits_of(model))]
    for count in (256, 512):
        model.resize_token_embeddings(count, mean_resizing=False)
        out = logits(model, torch.randint(count, (4, 16)))
        assert (out.logsumexp(-1) - out.mean(-1)).mean().item() == pytest.approx(math.log(count), rel=0.05)
    # Of cs336 an untied map is of variance 2 / (in + out).
    wanted = [1.0, (320 / 576) ** 0.5 if (preset, tied) == ("cs336", False) else 1.0]
    for table, before, factor in zip((model.model.inputs.table, logits_of(model)), old, wanted, strict=True):
        assert table.weight[256:].std().item() == pytest.approx(before * factor, rel=0.05)
        assert table.weight[:256].std().item() == before


def logits_of(model):
    """What makes the logits."""
    return model.model.inputs.table if model.config.tie_word_embeddings else model.model.outputs.linear


def test_images(tmp_path):
    ends = (Patches((3, 8, 8), (4, 4), class_token=True), Classes(5, pool="class"))
    config = ours.PolyheadConfig(TransformerConfig(*ends, dim=16, heads=Hyla(2), positions=Learned()))
    torch.manual_seed(0)
    model = ours.PolyheadForImageClassification(config).eval()
    assert config.num_labels == 5
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([1, 4])
    out = again(images, labels=labels)
    assert out.logits.shape == (2, 5)
    assert torch.equal(out.logits, model.model(images)[:, 0])
    assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    assert torch.equal(again(images, return_dict=False)[0], out.logits)
    with pytest.raises(ValueError, match=r"^PolyheadConfig: 3 labels but the model has 5 classes$"):
        ours.PolyheadConfig(config.transformer, num_labels=3)


def test_it_can_be_pushed_to_the_hub(monkeypatch):
    """By the library's own method: what goes up is the folder that `save_pretrained` writes."""
    sent = []
    hub = transformers.utils.hub
    monkeypatch.setattr(
        hub, "hf_api", lambda: SimpleNamespace(create_repo=lambda *_, **__: SimpleNamespace(repo_id="a/b"))
    )
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: SimpleNamespace(save=lambda _: None))
    monkeypatch.setattr(
        ours.PolyheadForCausalLM, "_upload_modified_files", lambda _, path, *__, **___: sent.extend(os.listdir(path))
    )
    make().push_to_hub("a/b")
    assert set(sent) == {"config.json", "generation_config.json", "model.safetensors", "modeling_polyhead.py"}


# ----------------------------------------------------------------------------------------------------------- mistakes
def written(folder, change):
    """The folder of a saved model with `change` made to its config.json."""
    make().save_pretrained(folder)
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return folder


MISTAKES = {
    "no field": (
        lambda data: data.pop("transformer"),
        "PolyheadConfig: `transformer`, the JSON of a TransformerConfig, was wanted but there is none: "
        "this is no configuration of a polyhead model",
    ),
    "no object": (
        lambda data: data.update(transformer="os.system"),
        "PolyheadConfig: transformer: an object with fields was wanted but 'os.system' came",
    ),
    "field": (
        lambda data: data["transformer"].update(code="import os"),
        "PolyheadConfig: transformer: unknown field 'code'",
    ),
    "kind": (
        lambda data: data["transformer"]["heads"][0].update(kind="os.system"),
        "PolyheadConfig: transformer: heads: unknown kind 'os.system'",
    ),
    "type": (
        lambda data: data["transformer"].update(dim="sixteen"),
        "PolyheadConfig: transformer: dim: int was wanted but 'sixteen' came",
    ),
    "a run": (
        lambda data: data["transformer"].update(kind="Train"),
        "PolyheadConfig: transformer: unknown field",
    ),
    "vocabulary": (
        lambda data: data.update(vocab_size=60),
        "PolyheadConfig: vocab_size is 50 by its `transformer` but 60 came",
    ),
    "not causal": (
        lambda data: data["transformer"].update(causal=False),
        "PolyheadForCausalLM: a causal model between Tokens and Logits, without an encoder, was wanted",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_configuration_that_is_wrong_is_one_clear_line(name, tmp_path):
    change, line = MISTAKES[name]
    folder = written(tmp_path, change)
    with pytest.raises(ValueError, match=r"^Polyhead") as caught:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_strangers_configuration_runs_no_code(tmp_path):
    """Not even where it says that it comes with some, and a file that would be unpickled is not looked at."""
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    auto = {"AutoConfig": "evil.PolyheadConfig", "AutoModelForCausalLM": "evil.PolyheadForCausalLM"}
    folder = written(tmp_path / "model", lambda data: data.update(auto_map=auto))
    (folder / "evil.py").write_text(code)
    assert type(transformers.AutoModelForCausalLM.from_pretrained(folder)) is ours.PolyheadForCausalLM
    assert not (tmp_path / "ran").exists()


def test_sizes_are_those_of_the_transformer():
    config = ours.PolyheadConfig(settings())
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (50, 16, 2)
    assert (config.num_attention_heads, config.max_position_embeddings, config.tie_word_embeddings) == (4, 24, True)
    assert ours.PolyheadConfig(**config.to_dict()).settings == settings()
    assert json.loads(config.to_json_string())["transformer"] == configs.to_dict(settings())
    with pytest.raises(AttributeError, match="hidden_size"):
        config.hidden_size = 3


def test_what_a_model_cannot_be_given():
    model = make()
    for given, line in (
        (
            {"input_ids": tokens(1, 3), "past_key_values": transformers.DynamicCache()},
            "must be a PolyheadCache but is a D",
        ),
        (
            {"input_ids": tokens(1, 3), "attention_mask": torch.ones(1, 4)},
            r"must be \(b s\) = \(1, 3\), the tokens bef",
        ),
    ):
        with pytest.raises(ValueError, match=line):
            model(**given)
    with pytest.raises(ValueError, match=r"^Transformer: tokens must be 0 to 49 but 50 came$"):
        model(torch.tensor([[50]]))
    with pytest.raises(ValueError, match=r"^MultiHeadAttention: 25 positions but max_length is 24$"):
        model(tokens(1, 25))
    with pytest.raises(ValueError, match=r"^MultiHeadAttention: 25 positions but max_length is 24$"):
        model.generate(tokens(1, 20), max_new_tokens=6, do_sample=False)


def test_another_version_of_the_library_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")  # which other tests may load anew
    with pytest.raises(ImportError, match=r"^polyhead.compat.huggingface needs transformers: .* \(version 5, not 4"):
        runpy.run_path(ours.__file__)


def test_a_folder_that_an_earlier_version_exported(fixtures):
    """By commit 3743f16, see tests/train/test_earlier_runs.py."""
    made = fixtures / "made_by_3743f16"
    wanted = torch.tensor(json.loads((made / "expected.json").read_text())["exported"])
    model = ours.PolyheadForCausalLM.from_pretrained(made / "exported").eval()
    assert_close(model(torch.arange(24).view(2, 12)).logits[:, -1, ::16].detach(), wanted, rtol=1e-5, atol=1e-6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "exported")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
