"""Our models in transformers: the backbone, text classifiers, and additional outputs."""

import json
import os
import subprocess
import sys

import pytest
import torch
from refusals import refusing
from tiny_transformers import COUNT, hf, ours, tokens, transformers
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph
from polyhead.analysis import capture, codes

MIXED = {"heads": (ph.Softmax(1), ph.Linear(1), ph.Hyla(2))}
DUAL = {"heads": (ph.Softmax(2), ph.Relational(2)), "positions": ph.Learned(), "norm_order": "post"}
SCALED = {"inputs": ph.Tokens(COUNT, scaled=True), "outputs": ph.Logits(COUNT, tied=True)}
WINDOW = {"heads": (ph.Hyla(4),), "window": 2, **SCALED}
CLASSES, IMAGES = "PolyheadForSequenceClassification", "PolyheadForImageClassification"


def make(kind="PolyheadForCausalLM", **changes):
    return ours(kind, **{**MIXED, **changes})


LOOK = {"output_hidden_states": True, "output_attentions": True}


@pytest.mark.parametrize("changes", [MIXED, DUAL, WINDOW], ids=["mixed", "dual", "window"])
@torch.no_grad()
def test_the_backbone_of_a_language_model(changes, tmp_path):
    model, ids = make(**changes), tokens(2, 6)
    model.save_pretrained(tmp_path)
    backbone, told = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(backbone) is hf.PolyheadModel
    assert not any(told.values())
    out, plain = backbone(ids, **LOOK), model(ids, logits_to_keep=2)
    assert_close(model.model.outputs(out.last_hidden_state[:, -2:]), plain.logits)
    assert backbone(ids, return_dict=False)[0].equal(out.last_hidden_state)
    assert [x.shape for x in out.hidden_states] == [(2, 6, 16)] * 3
    assert torch.equal(out.hidden_states[2], out.last_hidden_state)
    if changes is not DUAL:  # whose blocks are given symbols
        first, second, last = out.hidden_states
        assert_close(first, model.model.inputs(ids))
        assert_close(model.model.blocks[0](first), second)
        assert_close(model.model.norm(model.model.blocks[1](second)), last)
    seen = capture(model.model, ph.Batch(ids, ids, None, torch.ones(2, 6), {}))
    for layer, code in zip(seen, out.attentions, strict=True):
        assert code.shape == (2, 4, 6, 6)
        assert_close(code[:, :, 4, 3], codes(layer, 4, 3))
        assert (code.triu(1) == 0).all()
    assert_close(model(ids, logits_to_keep=2, **LOOK).hidden_states[-1], out.last_hidden_state)
    assert_close(model(ids, logits_to_keep=2, **LOOK).logits, plain.logits)


@pytest.mark.parametrize("options", [{}, {"tied": True, "scaled": True}], ids=["untied", "scaled"])
def test_trainers_that_make_the_logits_themselves(options):
    """As TRL does: from the backbone's result, the weight of the output embeddings, and `logit_scale`."""
    model, ids = make(outputs=ph.Logits(COUNT, **options)), tokens(2, 5)
    names = set(model.state_dict())
    with torch.no_grad():
        x = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        end = model.get_output_embeddings()
        assert_close(F.linear(x, end.weight, end.bias) * (model.config.logit_scale or 1.0), model(ids).logits)
    assert set(model.state_dict()) == names
    model.train().model.blocks[0].eval()
    assert model.base_model.training
    assert not model.model.blocks[0].training  # asking changes nothing


def test_hidden_states_and_attentions_have_gradients():
    model, ids = make(), tokens(1, 5)
    out = model(ids, **LOOK)
    (out.attentions[0].square().sum() + out.hidden_states[1].square().sum()).backward()
    assert model.model.blocks[0].attention.qkv.weight.grad.abs().max() > 0


@torch.no_grad()
def test_generation_returns_the_codes_of_each_step():
    """Linear heads then keep each key, not a sum."""
    model, ids = make(), tokens(2, 4)
    said = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, **LOOK)
    assert [step[0].shape for step in said.attentions] == [(2, 4, 4, 4), (2, 4, 1, 5), (2, 4, 1, 6)]
    whole = model(said.sequences[:, :-1], **LOOK)
    assert_close(said.attentions[2][1], whole.attentions[1][:, :, -1:])
    assert_close(said.hidden_states[2][1], whole.hidden_states[1][:, -1:])


@torch.no_grad()
def test_embeddings_in_place_of_tokens():
    model, ids = make(**WINDOW), tokens(2, 5)
    rows = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=rows).logits, model(ids).logits)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert_close(model(None, mask, inputs_embeds=rows).logits, model(ids, mask).logits)
    how = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(inputs_embeds=rows, **how), model.generate(ids, **how)[:, 5:])
    other = rows.clone()
    other[:, 0] += 1  # no token's row
    assert not torch.allclose(model(inputs_embeds=other).logits, model(inputs_embeds=rows).logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": rows}):
        with refusing("input_ids (b t) or inputs_embeds (b t m) were wanted but "):
            model(**wrong)


def test_images():
    """Their classes, and the backbone."""
    ends = {"inputs": ph.Patches((3, 8, 8), (4, 4), class_token=True), "outputs": ph.Classes(5, pool="class")}
    patches = {**ends, "causal": False, "positions": ph.Learned()}
    model, images, labels = make(IMAGES, **patches), torch.randn(2, 3, 8, 8), torch.tensor([1, 4])
    backbone = make("PolyheadModel", **patches)
    backbone.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        out, classified = backbone(pixel_values=images, **LOOK), model(images, labels=labels, **LOOK)
        assert torch.equal(model(images, return_dict=False)[0], classified.logits)
    assert out.last_hidden_state.shape == (2, 5, 16)
    assert_close(model.model.outputs(out.last_hidden_state)[:, 0], classified.logits)
    assert_close(classified.loss, F.cross_entropy(classified.logits, labels))
    assert_close(classified.attentions, out.attentions)
    assert_close(classified.hidden_states[-1], out.last_hidden_state)
    assert model.get_input_embeddings() is model.model.inputs.linear
    with refusing("PolyheadConfig: 3 labels but the model has 5 classes"):
        hf.PolyheadConfig(model.config.transformer, num_labels=3)
    assert model.bfloat16()(images).logits.dtype == torch.bfloat16  # image processors return float32


# --------------------------------------------------------------------------------------------------- texts and labels
@torch.no_grad()
def test_the_class_is_read_off_the_last_real_token(tmp_path):
    make().save_pretrained(tmp_path)
    torch.manual_seed(0)
    auto = transformers.AutoModelForSequenceClassification
    model, told = auto.from_pretrained(tmp_path, num_labels=3, pad_token_id=0, output_loading_info=True)
    assert told["missing_keys"] == {"score.weight"}
    assert 0.5 < model.score.weight.std() / 16**-0.5 < 1.5
    ids = tokens(3, 6)
    alone = [model(row[None, :length]).logits[0] for row, length in zip(ids, (6, 3, 4), strict=True)]
    right, left = ids.clone(), torch.zeros_like(ids)
    for i, length in enumerate((6, 3, 4)):
        right[i, length:] = 0
        left[i, 6 - length :] = ids[i, :length]
    assert_close(model(right).logits, torch.stack(alone))
    for padded in (right, left):
        assert_close(model(padded, (padded != 0).long()).logits, torch.stack(alone))
    x = model.model(ids[:1])
    assert_close(alone[0], model.score(x)[0, -1])
    model.config.pad_token_id = None
    with refusing("PolyheadForSequenceClassification: attention_mask or config.pad_token_id"):
        model(ids)
    model.save_pretrained(tmp_path / "fine")
    again = auto.from_pretrained(tmp_path / "fine")
    assert again.num_labels == 3
    assert torch.equal(again(ids[:1]).logits[0], alone[0])


def test_the_loss_of_classes():
    model, ids, labels = make(CLASSES, num_labels=3), tokens(2, 5), torch.tensor([2, 0])
    ones = torch.ones_like(ids)
    out = model(ids, ones, labels=labels)
    assert_close(out.loss, F.cross_entropy(out.logits, labels))
    several = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    model.config.problem_type = None
    assert_close(model(ids, ones, labels=several).loss, F.binary_cross_entropy_with_logits(out.logits, several))
    balanced = make(CLASSES, num_labels=3, feedforward=ph.Experts(2, 1, 8, balance=3.0))
    loss = balanced.train()(ids, ones, labels=labels).loss
    assert_close(loss, balanced.eval()(ids, ones, labels=labels).loss + balanced.model.auxiliary_loss())


def test_a_model_with_classes_of_its_own_keeps_its_map(tmp_path):
    """Also with more tokens."""
    model = make(CLASSES, outputs=ph.Classes(4), causal=False)
    ids, mask = tokens(2, 5), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert (model.score, model.num_labels) == (None, 4)
    with torch.no_grad():
        assert_close(model(ids, mask).logits[0], model.model(ids[:1, :3])[0, 0])
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert (again.config.vocab_size, again.config.settings.outputs) == (model.config.vocab_size, ph.Classes(4))
    assert torch.equal(again(ids).logits, model(ids).logits)


# ----------------------------------------------------------------------------------------------------------- mistakes
NOT_OF_VECTORS = {
    "PolyheadModel": "a model of Tokens or Patches, without an encoder, was wanted but it reads Vectors(size=3",
    CLASSES: "a model of Tokens, without an encoder, was wanted but it reads Vectors(size=3",
    "PolyheadForCausalLM": "a causal model between Tokens and Logits, without an encoder, was wanted but it is",
    IMAGES: "a model between Patches and Classes was wanted but it is between Vectors(",
}


@pytest.mark.parametrize("kind", NOT_OF_VECTORS)
def test_models_that_cannot_be_made(kind):
    with refusing(f"{kind}: {NOT_OF_VECTORS[kind]}"):
        make(kind, inputs=ph.Vectors(3))


# ---------------------------------------------------------------------------------------------- in a process of its own
CODE = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM
transformers.logging.set_verbosity_error()
ours, held, again = sys.argv[1:]
ids, said = torch.tensor([[3, 4, 5]]), {}

def refused(make, *given, **options):
    try:
        return make(*given, **options)
    except ValueError as error:
        return str(error)

said["refused"] = refused(AutoModelForCausalLM.from_pretrained, ours, trust_remote_code=False)
kinds = AutoModelForCausalLM, LlamaForCausalLM, AutoConfig
said["unknown"] = [refused(kind.from_pretrained, held, trust_remote_code=False) for kind in kinds]
for folder in (ours, held):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    said[type(model).__name__] = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
model = AutoModel.from_pretrained(ours, trust_remote_code=True)
said[type(model).__name__] = list(model(ids).last_hidden_state.shape)
model.save_pretrained(again)  # no copy of our source
said["plain"] = refused(LlamaForCausalLM.from_pretrained(held), ids)  # now we are imported
print(json.dumps(said))
"""


def test_a_folder_finds_its_classes_in_a_process_that_has_not_imported_us(tmp_path):
    """By the module in the folder, which `trust_remote_code` lets run; without it, a line says so.

    A checkpoint some of whose layers hold heads is the same model there, or an error."""
    model = make()
    model.save_pretrained(tmp_path / "ours")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=COUNT, initializer_range=0.5, **small)
    holding = hf.with_heads(config, [None, [ph.Relational(1), ph.Hyla(1)]])
    assert (config.model_type, type(config)) == ("llama", transformers.LlamaConfig)
    held = transformers.AutoModelForCausalLM.from_config(holding).eval()
    assert [hasattr(layer.self_attn, "polyhead") for layer in held.model.layers] == [False, True]
    held.save_pretrained(tmp_path / "held")
    folders = [tmp_path / name for name in ("ours", "held", "again")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", CODE, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    ids = torch.tensor([[3, 4, 5]])
    wanted = {type(m).__name__: m.generate(ids, max_new_tokens=4, do_sample=False).tolist() for m in (model, held)}
    said = json.loads(done.stdout.splitlines()[-1])
    assert "pass the argument `trust_remote_code=True`" in said.pop("refused").splitlines()[-1]
    unknown = said.pop("unknown")
    assert [("trust_remote_code" in line or "polyhead_heads" in line) for line in unknown] == [True] * 3
    assert "LlamaAttention must belong to a model whose configuration holds heads" in said.pop("plain")
    assert said == {**wanted, "PolyheadModel": [1, 3, 16]}
    files = {path.name for path in (tmp_path / "again").iterdir()}
    assert files == {"config.json", "model.safetensors", "modeling_polyhead.py"}
    found = json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"]
    assert found["AutoConfig"] == "modeling_polyhead.PolyheadConfig"
