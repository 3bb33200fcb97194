"""Sources of text, their held-out splits, and errors for missing text."""

import itertools
import sys
import types
from unittest import mock

import pytest
from refusals import refused
from texts import all_documents, documents, lines, task_of

from polyhead.tasks.text import sources
from polyhead.tasks.text.sources import SPLITS


def test_every_file_is_in_one_split_whole(folder, tmp_path):
    files = sorted(path.read_bytes() for path in folder.rglob("[0-9]*.txt"))
    for path in folder.rglob("[0-9]*.txt"):  # a link to a file makes no second document
        (folder / f"link-{path.name}").symlink_to(path)
    task = task_of(folder, tmp_path, held_out=0.1)
    by_split = documents(task)
    assert sorted(all_documents(by_split)) == files
    size = sum(map(len, files))
    for split in ("validation", "iid"):
        assert 0.07 * size < sum(map(len, by_split[split])) <= 0.1 * size
    counts = task._corpus.manifest["splits"]
    for split in SPLITS:
        size = sum(len(document) + 1 for document in by_split[split])
        assert counts[split]["bytes"] == size
        assert counts[split]["tokens"] == size + 1


def test_small_files_among_large_ones_do_not_leave_a_split_empty(tmp_path):
    for number in range(50):  # all the small ones fit into validation, and no large one fits anywhere
        (tmp_path / f"{number}.txt").write_text(lines(3000 if number < 10 else 10, number))
    by_split = documents(task_of(tmp_path, tmp_path))
    size = sum(map(len, all_documents(by_split)))
    assert size == sum(path.stat().st_size for path in tmp_path.glob("*.txt"))
    for split in ("validation", "iid"):
        assert 0.03 * size < sum(map(len, by_split[split])) <= 0.05 * size


def test_blocks_of_one_large_file_are_held_out_at_the_ends_of_lines(tmp_path):
    path = tmp_path / "one.log"
    path.write_text(lines(3000, 0))
    by_split = documents(task_of(path, tmp_path))
    text = path.read_bytes()
    blocks = sorted((text.index(block), block, split) for split in SPLITS for block in by_split[split])
    assert b"".join(block for _, block, _ in blocks) == text
    assert all(block.endswith(b"\n") for _, block, _ in blocks)
    splits = [split for _, _, split in blocks]
    assert all(split != following for split, following in itertools.pairwise(splits))  # neighbours are one block
    for split in ("validation", "iid"):
        assert 0.03 < sum(map(len, by_split[split])) / len(text) <= 0.05
        assert len(by_split[split]) > 1


def test_a_text_without_lines_is_cut_between_characters(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "one.txt"
    path.write_text("日本語é" * 3000)
    corpus = task_of(path, tmp_path, tokenizer="bpe:262")._corpus
    texts = [corpus.codec.decode(corpus.tokens[split].tolist()) for split in SPLITS]
    assert all(texts)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts)
    assert sum(map(len, texts)) == 12000


def test_the_standard_library_is_its_sources_without_tests(tmp_path):
    files = sources.list_files("stdlib", tmp_path)
    names = [file.name for file in files]
    assert {"json/decoder.py", "argparse.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
    assert all(name.endswith(".py") and "_sysconfigdata" not in name for name in names)
    assert 5_000_000 < sum(file.size for file in files) < 20_000_000


def replace_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def offline(*args, **options):
    raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub (LocalEntryNotFoundError)\nand more")


def test_a_data_set_of_the_hub_is_streamed_up_to_its_limit(tmp_path, monkeypatch):
    rows = [{"text": lines(5, number % 150), "url": "x"} for number in range(400)]
    load_dataset = mock.Mock(return_value=rows)
    replace_hub(monkeypatch, load_dataset)
    limit = sum(len(row["text"].encode()) for row in rows[:200])
    task = task_of("hub:allenai/c4/en", tmp_path, limit=limit, held_out=0.1)
    by_split = documents(task)
    assert sorted(all_documents(by_split)) == sorted(row["text"].encode() for row in rows[:200])
    load_dataset.assert_called_once_with("allenai/c4", "en", split="train", streaming=True)
    assert not set(by_split["train"]) & set(by_split["iid"])  # although some rows come twice
    assert not set(by_split["validation"]) & set(by_split["iid"])
    assert all(5 < len(by_split[split]) < 40 for split in ("validation", "iid"))
    replace_hub(monkeypatch, offline)
    again = task_of("hub:allenai/c4/en", tmp_path, limit=limit, held_out=0.1)
    assert again.count("iid") > 0  # what is there needs no network
    message = r"^Text: hub:allenai/c4/en cannot be read \(ConnectionError: Couldn't reach .*\)$"
    refused(lambda: task_of("hub:allenai/c4/en", tmp_path, limit=1000).count("iid"), message)


def test_what_cannot_be_read_says_so_in_one_line(folder, tmp_path):
    def refused_text(data, message, **fields):
        refused(lambda: task_of(data, tmp_path, **fields).count("iid"), message)

    refused_text(tmp_path / "none.txt", r"there is no .*none\.txt")
    (tmp_path / "bare").mkdir()
    refused_text(tmp_path / "bare", r"bare has no text; a folder\'s files need a usual suffix$")
    (tmp_path / "short.txt").write_text("short text\n" * 9)
    short = r"has \d+ tokens for 'iid', but a sequence takes 17; lower length or give more text"
    refused_text(tmp_path / "short.txt", short)
    (tmp_path / "file").write_text("a file")
    refused_text(folder, "file: File exists", cache="file")
    pytest.importorskip("tokenizers")
    (folder / "bad.txt").write_bytes(b"fine\n" * 100 + b"\xe9t\xe9\n")
    refused_text(folder, r"bad\.txt is no UTF-8; tokenizer='bytes' takes any file", tokenizer="bpe:290")
    assert b"\xe9t\xe9" in b"".join(all_documents(documents(task_of(folder, tmp_path))))
