"""Sources of text, their held-out splits, and errors for missing text."""

import itertools
import sys
import types

import pytest
from refusals import refused
from texts import all_documents, documents, lines, task_of

from polyhead.tasks.text import corpus, sources
from polyhead.tasks.text.sources import SPLITS

pytestmark = pytest.mark.usefixtures("afresh")


# --------------------------------------------------------------------------------------------------------------- splits
def test_every_file_is_in_one_split_whole(folder, tmp_path):
    task = task_of(folder, tmp_path, held_out=0.1)
    found = documents(task)
    wanted = sorted(path.read_bytes() for path in folder.rglob("[0-9]*.txt"))
    assert sorted(all_documents(found)) == wanted
    size = sum(map(len, wanted))
    for split in ("validation", "iid"):
        assert 0.07 * size < sum(map(len, found[split])) <= 0.1 * size
    counts = task._corpus().manifest["splits"]
    assert {split: counts[split]["bytes"] for split in SPLITS} == {s: sum(len(t) + 1 for t in found[s]) for s in SPLITS}
    assert all(counts[split]["tokens"] == counts[split]["bytes"] + 1 for split in SPLITS)


def test_small_files_among_large_ones_do_not_leave_a_split_empty(tmp_path):
    for number in range(50):  # all the small ones fit into validation, and no large one fits anywhere
        (tmp_path / f"{number}.txt").write_text(lines(3000 if number < 10 else 10, number))
    found = documents(task_of(tmp_path, tmp_path))
    size = sum(map(len, all_documents(found)))
    assert size == sum(path.stat().st_size for path in tmp_path.glob("*.txt"))
    for split in ("validation", "iid"):
        assert 0.03 * size < sum(map(len, found[split])) <= 0.05 * size


def test_blocks_of_one_large_file_are_held_out_at_the_ends_of_lines(tmp_path):
    path = tmp_path / "one.log"
    path.write_text(lines(3000, 0))
    found = documents(task_of(path, tmp_path))
    whole = path.read_bytes()
    places = sorted((whole.index(text), len(text)) for text in all_documents(found))
    assert sum(size for _, size in places) == len(whole)
    assert all(start + size == after for (start, size), (after, _) in itertools.pairwise(places))
    assert all(text.endswith(b"\n") for text in all_documents(found))
    of = [next(split for split in SPLITS if whole[start : start + size] in found[split]) for start, size in places]
    assert all(one != other for one, other in itertools.pairwise(of))  # what stands together stays together
    for split in ("validation", "iid"):
        assert 0.03 < sum(map(len, found[split])) / len(whole) <= 0.05
        assert len(found[split]) > 1


def test_a_text_without_lines_is_cut_between_characters(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "one.txt"
    path.write_text("日本語é" * 3000)
    corpus = task_of(path, tmp_path, tokenizer="bpe:262")._corpus()
    found = [corpus.codec.decode(corpus.tokens[split].tolist()) for split in SPLITS]
    assert all(found)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found)
    assert sum(map(len, found)) == 12000


def test_the_standard_library_is_its_sources_without_tests(tmp_path):
    files = sources.list_files("stdlib", tmp_path)
    names = [file.name for file in files]
    assert {"json/decoder.py", "argparse.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
    assert all(name.endswith(".py") and "_sysconfigdata" not in name for name in names)
    assert 5_000_000 < sum(file.size for file in files) < 20_000_000


# ------------------------------------------------------------------------------------------------------------------ hub
def hub(monkeypatch, load):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def offline(*given, **options):
    raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub (LocalEntryNotFoundError)\nand more")


def test_a_data_set_of_the_hub_is_streamed_up_to_its_limit(tmp_path, monkeypatch):
    rows = [{"text": lines(5, number % 150), "url": "x"} for number in range(400)]
    calls = []
    hub(monkeypatch, lambda *given, **options: calls.append((given, options)) or rows)
    limit = sum(len(row["text"].encode()) for row in rows[:200])
    task = task_of("hub:allenai/c4/en", tmp_path, limit=limit, held_out=0.1)
    found = documents(task)
    assert sorted(all_documents(found)) == sorted(row["text"].encode() for row in rows[:200])
    assert calls == [(("allenai/c4", "en"), {"split": "train", "streaming": True})]
    assert not set(found["train"]) & set(found["iid"])  # although some rows come twice
    assert not set(found["validation"]) & set(found["iid"])
    assert all(5 < len(found[split]) < 40 for split in ("validation", "iid"))
    corpus.open_corpus.cache_clear()
    hub(monkeypatch, offline)
    assert task.count("iid") > 0  # what is there needs no network
    text = r"^Text: hub:allenai/c4/en cannot be read \(ConnectionError: Couldn't reach .*\)$"
    refused(lambda: task_of("hub:allenai/c4/en", tmp_path, limit=1000).count("iid"), text)


# ------------------------------------------------------------------------------------------------------------ bad input
def test_what_cannot_be_read_says_so_in_one_line(folder, tmp_path):
    def refused_text(data, text, **fields):
        refused(lambda: task_of(data, tmp_path, **fields).count("iid"), text)

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
