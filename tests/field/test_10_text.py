"""Texts and tokenizers that users bring: links in circles, odd tokenizer files, null rows."""

import json
import os
import sys
import types

import numpy as np
import pytest
from refusals import refused
from texts import all_documents, documents, task_of

from polyhead.tasks import RelationalGames
from polyhead.tasks.relational_games import original
from polyhead.tasks.text import tokens


def test_links_that_lead_to_their_own_folder_are_not_followed(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"text {number}\n" * 20)
    os.symlink(folder, folder / "again")
    os.symlink(folder, folder / "and again")
    texts = all_documents(documents(task_of(folder, tmp_path, held_out=0.2)))
    assert sorted(texts) == sorted(path.read_bytes() for path in folder.glob("*.txt"))


def test_a_null_row_of_a_data_set_is_named(tmp_path, monkeypatch):
    rows = [{"text": "one", "url": "x"}, {"text": None, "url": "y"}]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *names, **options: rows))
    call = task_of("hub:owner/name", tmp_path, limit=1000).fingerprint
    refused(call, r"^Text: hub:owner/name cannot be read \(.*row 2: 'text' is NoneType, not text \(of text, url\)\)$")
    missing = task_of("hub:owner/name", tmp_path, limit=1000, column="body").fingerprint
    refused(missing, r"^Text: hub:owner/name cannot be read \(.*row 1: 'body' is absent, not text \(of text, url\)\)$")


def tokenizer_json(**parts):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", "added_tokens": [], **empty, "model": model, **parts})


BROKEN = {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}
ENDLESS = {**BROKEN, "pattern": {"Regex": "(a+)+$"}}
FILES = {
    "empty vocabulary": (tokenizer_json(model={"type": "BPE", "vocab": {}, "merges": []}).encode(), "empty vocabulary"),
    "UTF-16": (tokenizer_json().encode("utf-16"), "cannot be read as a tokenizer.json in UTF-8"),
    "broken expression": (tokenizer_json(pre_tokenizer=BROKEN).encode(), "fails in tokenizers"),
    "panic": (
        tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}).encode(),
        "fails in tokenizers",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_tokenizer_file_that_cannot_be_used_is_named(name, tmp_path):
    pytest.importorskip("tokenizers")
    path, (data, reason) = tmp_path / "tokenizer.json", FILES[name]
    path.write_bytes(data)
    refused(lambda: tokens.read(path), f"^Text: {path} .*{reason}")


@pytest.mark.parametrize(("text", "pre_tokenizer"), [("b", None), ("a" * 40 + "b", ENDLESS)], ids=["unknown", "panic"])
def test_a_text_that_a_tokenizer_cannot_encode_is_refused_with_its_file(text, pre_tokenizer, tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json(pre_tokenizer=pre_tokenizer))
    codec = tokens.read(path)
    for encode in (codec.encode, lambda text: codec.encode_all([text])):
        refused(lambda encode=encode: encode(text), f"^Text: {path} fails in tokenizers: ")


def test_a_million_blanks_are_encoded():
    pytest.importorskip("tokenizers")
    codec = tokens.train(["a text"], 257)
    (blank,) = codec.encode(" ")
    assert codec.encode(" " * 1_000_000) == [blank] * 1_000_000


def test_an_npz_that_unpacks_to_gigabytes_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    images, labels = np.zeros((1000, 36, 36, 3), np.uint8), np.zeros(1000, np.uint8)
    np.savez_compressed(tmp_path / "same_pentos.npz", images=images, labels=labels)
    monkeypatch.setattr(original, "LARGEST", 1 << 20)  # these images are four times as large
    monkeypatch.setattr(np.lib.format, "read_array", lambda *args, **options: pytest.fail("it was unpacked"))
    task = RelationalGames("same", data="original", folder=str(tmp_path))
    text = r"^RelationalGames: .*same_pentos\.npz unpacks to 3 MB; at most 1 are read$"
    refused(lambda: task.batch("train", 1, seed=0, step=0), text)
