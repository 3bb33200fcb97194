"""A Hugging Face folder that cannot be explored: one line and an exit code other than 0."""

import json

import pytest
import safetensors.torch
from commands import mistake
from tiny_transformers import transformers

from polyhead.compat.huggingface.tokens import tokenizer_of
from polyhead.tasks.text.tokens import Bytes

WEIGHT = "transformer.h.0.attn.c_attn.weight"
FAULTS = {
    "no heads": ({"n_head": 0}, "must hold a causal model and its tokenizer ("),
    "a negative number of heads": ({"n_head": -2}, "must hold a causal model and its tokenizer ("),
    "more layers": ({"n_layer": 2}, "must hold all weights, but 12 are missing, first transformer.h.1."),
    "a length that is no number": ({}, "must hold a causal model and its tokenizer ('>' not supported between"),
    "a missing weight": ({}, f"must hold all weights, but 1 are missing, first {WEIGHT}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_with_a_fault_is_one_line(fault, tmp_path, capsys, monkeypatch):
    changes, line = FAULTS[fault]
    sizes = {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    tokenizer_of(Bytes()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    if fault == "a missing weight":
        weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
        del weights[WEIGHT]
        safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    if fault == "a length that is no number":
        (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": "long"}')
    monkeypatch.chdir(tmp_path)
    refusal = mistake(capsys, ["explore", str(tmp_path), "--text", "hello"])
    assert refusal.startswith("explore: ")
    assert line in refusal
    assert not (tmp_path / "explore.html").exists()
