"""Tokenised corpora: made once, whole or not at all, and again when the text has changed."""

import os
from unittest import mock

import numpy as np
import pytest
from refusals import refused
from texts import all_documents, documents, task_of

from polyhead.tasks.text import corpus


def test_a_text_is_tokenised_once_and_an_interrupted_process_leaves_no_corpus(folder, tmp_path, capsys, monkeypatch):
    with mock.patch.object(corpus, "write", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        task_of(folder, tmp_path).count("iid")
    fingerprints = []
    for quiet in ("1", ""):
        monkeypatch.setenv("POLYHEAD_QUIET", quiet)
        task = task_of(folder, tmp_path)
        size = sum(path.stat().st_size for path in folder.rglob("[0-9]*.txt"))
        assert sum(map(len, all_documents(documents(task)))) == size
        fingerprints.append(task.fingerprint())
    assert fingerprints[0] == fingerprints[1]
    assert capsys.readouterr().err.count("tokenising") == 1  # the interrupted process
    assert not list((tmp_path / "cache").glob("*.part"))


@pytest.mark.parametrize("harm", ["shorter", "missing", "manifest"])
def test_a_damaged_corpus_is_refused(harm, folder, tmp_path):
    task = task_of(folder, tmp_path)
    task.count("iid")
    (path,) = (entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())
    if harm == "shorter":
        os.truncate(path / "iid.bin", 99)
    elif harm == "missing":
        (path / "validation.bin").unlink()
    else:
        (path / "manifest.json").write_text("[" * 100_000)
    refused(lambda: task_of(folder, tmp_path).count("iid"), rf"^Text: {path} is damaged \(.*\); delete it")


def test_a_new_task_reads_text_that_was_edited_and_an_old_one_what_it_read(folder, tmp_path):
    old = task_of(folder, tmp_path)
    before, tokens = old.fingerprint(), old._corpus.tokens["train"].tolist()
    with (folder / "2.txt").open("a") as handle:
        handle.write("one more line\n")
    new = task_of(folder, tmp_path)
    assert new == old
    assert "one more line" in b"".join(all_documents(documents(new))).decode()
    assert (old.fingerprint(), old._corpus.tokens["train"].tolist()) == (before, tokens)


def test_tokens_take_as_few_bytes_as_they_can_and_the_fingerprint_is_of_the_text(folder, tmp_path):
    pytest.importorskip("tokenizers")
    plain, trained = task_of(folder, tmp_path), task_of(folder, tmp_path, tokenizer="bpe:290")
    assert plain._corpus.tokens["train"].dtype == np.uint8
    assert trained._corpus.tokens["train"].dtype == np.uint16
    assert plain.fingerprint() == trained.fingerprint() != task_of(folder, tmp_path, held_out=0.1).fingerprint()
    moved = task_of(folder.rename(tmp_path / "elsewhere"), tmp_path, "other")
    assert moved.fingerprint() == plain.fingerprint()


def test_a_tokenizer_is_trained_on_no_held_out_text(folder, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    texts, train_tokenizer = [], corpus.text_tokens.train

    def train(pieces, count):
        texts.extend(pieces)
        return train_tokenizer(texts, count)

    monkeypatch.setattr(corpus.text_tokens, "train", train)
    task_of(folder, tmp_path, tokenizer="bpe:280", held_out=0.2).count("iid")
    by_split = documents(task_of(folder, tmp_path, "bytes", held_out=0.2))
    assert [text.encode() for text in texts] == by_split["train"]
