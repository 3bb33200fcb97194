"""Tokens on the disk: every byte in one split, a killed process goes on, damage is seen, nothing is done twice."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from polyhead.tasks import Text, text_data, text_sources, text_writer
from polyhead.tasks.text_sources import SPLITS, Files
from polyhead.tasks.text_writer import Writer


@pytest.fixture(autouse=True)
def _afresh():
    """As in a new process."""
    text_data._open.cache_clear()
    text_data._CHECKED.clear()


def lines(count, seed):
    words = ["the", "café", "of", "naïve", "model", "日本", "return", "self", "0x7f"]
    dice = random.Random(seed)
    return "".join(" ".join(dice.choices(words, k=dice.randint(1, 9))) + "\n" for _ in range(count))


@pytest.fixture
def folder(tmp_path):
    """Sixty files of text, in folders, and things that are none."""
    root = tmp_path / "texts"
    (root / "inner").mkdir(parents=True)
    for number in range(60):
        (root / ("inner" if number % 2 else ".") / f"{number}.txt").write_text(lines(20 + 2 * number, number))
    (root / "empty.txt").write_text("")
    (root / "image.png").write_bytes(b"\x89PNG\xff\xff")
    (root / ".hidden.txt").write_text("hidden")
    return root


def task_of(data, tmp_path, cache="cache", **fields):
    return Text(str(data), folder=str(tmp_path / cache), length=16, **fields)


def place_of(tmp_path, cache="cache"):
    (found,) = (path for path in (tmp_path / cache).iterdir() if path.is_dir())
    return found


def contents(place):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "lock"}


def texts(task):
    """The documents of each split, as they are read back."""
    corpus = task._corpus()
    found = {}
    for split in SPLITS:
        row = corpus.tokens[split].tobytes()
        assert (row[0], row[-1]) == (0, 0)
        found[split] = row[1:-1].split(b"\0")
    return found


def everything(found):
    return [text for split in SPLITS for text in found[split]]


# --------------------------------------------------------------------------------------------------------------- splits
def test_every_file_is_in_one_split_whole(folder, tmp_path):
    task = task_of(folder, tmp_path, held_out=0.1)
    found = texts(task)
    wanted = sorted(path.read_bytes() for path in folder.rglob("[0-9]*.txt"))
    assert sorted(everything(found)) == wanted
    size = sum(map(len, wanted))
    for split in ("validation", "iid"):
        assert 0.07 * size < sum(map(len, found[split])) <= 0.1 * size
    counts = task._corpus().manifest["splits"]
    assert {split: counts[split]["bytes"] for split in SPLITS} == {s: sum(len(t) + 1 for t in found[s]) for s in SPLITS}
    assert all(counts[split]["tokens"] == counts[split]["bytes"] + 1 for split in SPLITS)
    assert place_of(tmp_path).parent.joinpath(".gitignore").read_text() == "*\n"


def test_what_is_held_out_does_not_depend_on_where_files_lie(folder, tmp_path):
    here = task_of(folder, tmp_path)
    here.count("iid")
    moved = folder.rename(tmp_path / "elsewhere")
    there = task_of(moved, tmp_path, "other")
    assert there.fingerprint() == here.fingerprint()
    assert there.fingerprint() != task_of(moved, tmp_path, "third", held_out=0.1).fingerprint()


def test_blocks_of_one_large_file_are_held_out_at_the_ends_of_lines(tmp_path):
    path = tmp_path / "one.log"
    path.write_text(lines(3000, 0))
    found = texts(task_of(path, tmp_path))
    whole = path.read_bytes()
    places = sorted((whole.index(text), len(text)) for text in everything(found))
    assert sum(size for _, size in places) == len(whole)
    assert all(start + size == after for (start, size), (after, _) in itertools.pairwise(places))
    assert all(text.endswith(b"\n") for text in everything(found))
    of = [next(split for split in SPLITS if whole[start : start + size] in found[split]) for start, size in places]
    assert all(one != other for one, other in itertools.pairwise(of))  # what stands together stays together
    for split in ("validation", "iid"):
        assert 0.03 < sum(map(len, found[split])) / len(whole) <= 0.05
        assert len(found[split]) > 1


def test_a_text_without_lines_is_cut_between_characters(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "one.txt"
    path.write_text("日本語é" * 3000)
    task = task_of(path, tmp_path, tokenizer="bpe:262")
    corpus = task._corpus()
    found = [corpus.codec.decode(corpus.tokens[split].tolist()) for split in SPLITS]
    assert all(found)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found)
    assert sum(map(len, found)) == 12000
    size = corpus.manifest["splits"]["train"]["bytes"]
    assert corpus.rate("train") == pytest.approx(size / (len(corpus.tokens["train"]) - 1))


def test_a_glob_takes_what_it_matches_and_a_limit_so_many_bytes(folder, tmp_path):
    (folder / "a.log").write_text(lines(900, 1))
    found = texts(task_of(folder / "**" / "*.log", tmp_path))
    assert sum(map(len, everything(found))) == (folder / "a.log").stat().st_size
    skip = tmp_path / "cache"
    whole = {path.name: path.read_bytes() for path in folder.rglob("[0-9]*.txt")}
    part = text_sources.files(str(folder), 20_000, skip)
    assert 20_000 <= sum(file.size for file in part) < 20_004
    cut = [file for file in part if file.size < file.whole]
    assert len(cut) == 1
    whole[cut[0].path.name][: cut[0].size].decode()  # within no character
    assert len(part) < 60
    assert text_sources.files(str(folder), 10**9, skip) == text_sources.files(str(folder), None, skip)
    assert len(text_sources.files(str(folder), None, folder / "inner")) == 30  # where the tokens are is no text
    found = texts(task_of(folder, tmp_path, "limited", limit=20_000))
    assert sum(map(len, everything(found))) == sum(file.size for file in part)


def test_the_standard_library_is_its_sources_without_tests(tmp_path):
    files = text_sources.files("stdlib", None, tmp_path)
    names = [file.name for file in files]
    assert {"json/decoder.py", "pathlib.py", "argparse.py"} <= set(names) or "pathlib/__init__.py" in names
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
    assert all(name.endswith(".py") and "_sysconfigdata" not in name for name in names)
    assert 5_000_000 < sum(file.size for file in files) < 20_000_000
    assert len(Files(files, 0.05, [[f.name, f.whole, f.changed, "known", f.size] for f in files]).parts) >= len(files)


# --------------------------------------------------------------------------------------------------------------- killed
KILLED = """
import os, signal, sys
from polyhead.tasks import Text, text_data
from polyhead.tasks.text_writer import Writer
text_data.STRETCH = 20_000
commit = Writer.commit
def dying(self):
    commit(self)
    if self.pieces > 25:
        self.handles["train"].write(b"not vouched for")
        self.handles["train"].flush()
        os.kill(os.getpid(), signal.SIGKILL)
Writer.commit = dying
Text(sys.argv[1], folder=sys.argv[2], length=16, tokenizer="bpe:290").count("iid")
"""


def asked(monkeypatch):
    """Where reading begins, each time that it does."""
    first, pieces = [], Files.pieces

    def noted(self, start=0, read=0):
        first.append(start)
        return pieces(self, start, read)

    monkeypatch.setattr(Files, "pieces", noted)
    return first


def test_killed_with_nine_and_resumed_it_is_the_same_to_the_byte(folder, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    code = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "cache")]
    died = subprocess.run(code, capture_output=True, text=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr
    place = place_of(tmp_path)
    assert not (place / "manifest.json").exists()
    first = asked(monkeypatch)
    task = task_of(folder, tmp_path, tokenizer="bpe:290")
    task.count("iid")
    assert len(first) == 1  # the tokenizer is not trained again
    assert first[0] > 25
    task_of(folder, tmp_path, "whole", tokenizer="bpe:290").count("iid")
    assert contents(place) == contents(place_of(tmp_path, "whole"))
    assert sorted(path.suffix for path in place.iterdir()) == ["", ".bin", ".bin", ".bin", ".json", ".json"]


class Killed(BaseException):
    """What no clause catches."""


@pytest.mark.parametrize("harm", ["none", "lost", "flipped", "journal", "header"])
def test_wherever_it_stops_it_goes_on_and_trusts_only_what_the_journal_vouches_for(
    harm, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(text_data, "STRETCH", 20_000)
    task_of(folder, tmp_path, "whole").count("iid")
    wanted = contents(place_of(tmp_path, "whole"))
    commit, first = Writer.commit, asked(monkeypatch)

    def stop_after(writer):
        commit(writer)
        raise Killed

    monkeypatch.setattr(Writer, "commit", stop_after)
    task, ends = task_of(folder, tmp_path), 0
    while not (tmp_path / "cache").exists() or not (place_of(tmp_path) / "manifest.json").exists():
        try:
            task.count("iid")
        except Killed:
            ends += 1
        assert ends < 40, "it does not come to an end"
        place = place_of(tmp_path)
        if ends == 4 and harm != "none":
            (journal,) = place.glob("*.journal")
            (row,) = place.glob("*.train.bin")
            data = bytearray(row.read_bytes())
            data[100] ^= 4
            if harm in ("lost", "flipped"):
                row.write_bytes(data[:-1] if harm == "lost" else data)
            else:
                journal.write_bytes(b"{}\n{}\n" if harm == "header" else b"{" + journal.read_bytes())
            ends += 1
        elif (place / "manifest.json").exists():
            break
        with next(place.glob("*.iid.bin")).open("ab") as row, next(place.glob("*.journal")).open("ab") as journal:
            row.write(b"more than the journal knows")
            journal.write(b'{"pieces": 1')
    assert contents(place) == wanted
    assert ends > 5
    assert first == sorted(first) if harm == "none" else first.count(0) == 2
    assert ("beginning anew" in capsys.readouterr().err) == (harm in ("lost", "flipped"))


def test_a_tokenizer_that_the_journal_does_not_know_is_trained_again(folder, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    task_of(folder, tmp_path, "whole", tokenizer="bpe:280").count("iid")
    commit, task = Writer.commit, task_of(folder, tmp_path, tokenizer="bpe:280")
    monkeypatch.setattr(Writer, "commit", lambda self: (commit(self), killed()))
    with pytest.raises(Killed):
        task.count("iid")
    monkeypatch.setattr(Writer, "commit", commit)
    next(place_of(tmp_path).glob("*.tokenizer.json")).write_text(text_data.text_tokens.Bytes().to_json())
    task.count("iid")
    assert contents(place_of(tmp_path)) == contents(place_of(tmp_path, "whole"))


# --------------------------------------------------------------------------------------------------------------- damage
def flip(path, place=50):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


HARMS = {
    "flipped": lambda place: flip(next(place.glob("*.train.bin"))),
    "shorter": lambda place: os.truncate(next(place.glob("*.iid.bin")), 99),
    "missing": lambda place: next(place.glob("*.validation.bin")).unlink(),
    "tokenizer": lambda place: flip(next(place.glob("*.tokenizer.json"))),
    "manifest": lambda place: flip(place / "manifest.json"),
    "number": lambda place: (place / "manifest.json").write_text(
        (place / "manifest.json").read_text().replace('"bytes": ', '"bytes": 1')
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_seen_told_and_mended(harm, folder, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    task = task_of(folder, tmp_path, tokenizer="bpe:280")
    task.count("iid")
    place = place_of(tmp_path)
    before = contents(place)
    capsys.readouterr()
    HARMS[harm](place)
    assert contents(place) != before
    text_data._open.cache_clear()
    text_data._CHECKED.clear()
    task.count("iid")
    assert contents(place) == before
    assert capsys.readouterr().err.count("tokenising again") == 1


def test_a_file_that_changed_since_it_was_checked_is_checked_again(folder, tmp_path):
    task = task_of(folder, tmp_path)
    task.count("iid")
    before = contents(place_of(tmp_path))
    path = next(place_of(tmp_path).glob("*.train.bin"))
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    text_data._open.cache_clear()  # the process knows the file to have been right
    task.count("iid")
    assert contents(place_of(tmp_path)) == before


# ----------------------------------------------------------------------------------------------------------------- once
def test_it_is_done_once_and_again_when_the_text_has_changed(folder, tmp_path, monkeypatch):
    task = task_of(folder, tmp_path)
    before = task.fingerprint()
    first, hashed = asked(monkeypatch), []
    hash_of = text_sources._hash
    monkeypatch.setattr(text_sources, "_hash", lambda path: hashed.append(path) or hash_of(path))
    text_data._open.cache_clear()
    assert task.fingerprint() == before
    assert (first, hashed) == ([], [])
    os.utime(folder / "2.txt", ns=(1, 1))
    text_data._open.cache_clear()
    assert task.fingerprint() == before
    assert (first, [path.name for path in hashed]) == ([], ["2.txt"])
    with (folder / "2.txt").open("a") as handle:
        handle.write("one more line\n")
    text_data._open.cache_clear()
    assert task.fingerprint() != before
    assert first == [0]
    assert len(list(place_of(tmp_path).glob("*.bin"))) == 3
    assert "one more line" in b"".join(everything(texts(task))).decode()


def test_a_process_waits_for_the_one_that_writes(folder, tmp_path, monkeypatch):
    task = task_of(folder, tmp_path)
    request = text_data.Request(task.data, "bytes", 0.05, None, "text", tmp_path / "cache")
    text_data._prepare(request.place, request.folder)
    waits, first, found = threading.Event(), asked(monkeypatch), []
    monkeypatch.setattr(text_data, "say", lambda line: waits.set() if "waiting for it" in line else None)
    with text_data._locked(request.place):
        other = threading.Thread(target=lambda: found.append(text_data._open.__wrapped__(request, "")))
        other.start()
        assert waits.wait(60)
        assert first == []
        text_data._build(request.place, request, request.source(None))
    other.join(60)
    assert first == [0]
    assert found[0].manifest["splits"]["train"]["tokens"] > 1000


def test_tokens_take_as_few_bytes_as_they_can(folder, tmp_path):
    pytest.importorskip("tokenizers")
    assert task_of(folder, tmp_path)._corpus().tokens["train"].dtype == np.uint8
    assert task_of(folder, tmp_path, tokenizer="bpe:290")._corpus().tokens["train"].dtype == np.uint16
    large = text_data.text_tokens.Bytes()
    large.count = 70_000
    assert Writer(tmp_path, "x", large).dtype == np.uint32


def test_the_fingerprint_is_of_the_text_and_not_of_the_tokenizer(folder, tmp_path):
    pytest.importorskip("tokenizers")
    assert task_of(folder, tmp_path).fingerprint() == task_of(folder, tmp_path, tokenizer="bpe:290").fingerprint()


# ------------------------------------------------------------------------------------------------------------------ hub
class Rows:
    """A streamed data set."""

    def __init__(self, rows):
        self.rows = rows

    def skip(self, count):
        return Rows(self.rows[count:])

    def __iter__(self):
        return iter(self.rows)


def hub(monkeypatch, load):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def test_a_data_set_of_the_hub_is_streamed_up_to_its_limit(tmp_path, monkeypatch):
    rows = [{"text": lines(5, number % 150), "url": "x"} for number in range(400)]
    calls = []
    hub(monkeypatch, lambda *given, **options: calls.append((given, options)) or Rows(rows))
    limit = sum(len(row["text"].encode()) for row in rows[:200])
    task = task_of("hub:allenai/c4/en", tmp_path, limit=limit, held_out=0.1)
    found = texts(task)
    assert sorted(everything(found)) == sorted(row["text"].encode() for row in rows[:200])
    assert calls == [(("allenai/c4", "en"), {"split": "train", "streaming": True})]
    assert not set(found["train"]) & set(found["iid"])  # although some rows come twice
    assert not set(found["validation"]) & set(found["iid"])
    assert all(5 < len(found[split]) < 40 for split in ("validation", "iid"))
    wanted = contents(place_of(tmp_path))
    text_data._open.cache_clear()
    hub(monkeypatch, offline)
    task.count("iid")  # what is there needs no network

    hub(monkeypatch, lambda *given, **options: Rows(rows))
    monkeypatch.setattr(text_data, "STRETCH", 3000)
    commit = Writer.commit
    monkeypatch.setattr(Writer, "commit", lambda self: (commit(self), self.pieces > 90 and killed()))
    other = task_of("hub:allenai/c4/en", tmp_path, "other", limit=limit, held_out=0.1)
    with pytest.raises(Killed):
        other.count("iid")
    monkeypatch.setattr(Writer, "commit", commit)
    other.count("iid")
    assert contents(place_of(tmp_path, "other")) == wanted


def killed():
    raise Killed


def offline(*given, **options):
    raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub (LocalEntryNotFoundError)\nand more")


def test_the_hub_without_a_network_is_one_clear_line(tmp_path, monkeypatch):
    task = task_of("hub:allenai/c4/en", tmp_path, limit=1000)
    wanted = (
        r"Text: hub:allenai/c4/en cannot be had \(ConnectionError: Couldn't reach .*\); data='stdlib' needs no network"
    )
    hub(monkeypatch, offline)
    with pytest.raises(ValueError, match=wanted) as error:
        task.count("iid")
    assert "\n" not in str(error.value)
    hub(monkeypatch, lambda *given, **options: Rows([{"content": "x"}]))
    with pytest.raises(ValueError, match=r"hub:allenai/c4/en has no text in 'text' \(it has content\)"):
        task.count("iid")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs datasets; pip install datasets"):
        task.count("iid")


# ------------------------------------------------------------------------------------------------------------ bad input
def test_what_cannot_be_read_says_so_in_one_line(folder, tmp_path):
    def refused(data, wanted, **fields):
        with pytest.raises(ValueError, match=wanted) as error:
            task_of(data, tmp_path, **fields).count("iid")
        assert "\n" not in str(error.value)

    refused(folder / "empty.txt", r"Text: .*empty\.txt is empty")
    refused(tmp_path / "none.txt", r"there is no .*none\.txt")
    refused(folder / "*.nothing", r"\*\.nothing has no file")
    (tmp_path / "bare").mkdir()
    refused(tmp_path / "bare", r"bare has no text file \(\.txt, .*\); a glob such as '.*bare/\*\*/\*\.log'")
    (tmp_path / "short.txt").write_text("short text\n" * 9)
    refused(tmp_path / "short.txt", r"has \d+ tokens for 'iid', but a sequence takes 17; lower length")
    pytest.importorskip("tokenizers")
    bad = folder / "31.txt"
    bad.unlink(missing_ok=True)
    (folder / "bad.txt").write_bytes(b"fine\n" * 100 + b"\xe9t\xe9\n")
    for tokenizer in ("bpe:290", None):
        if tokenizer is None:
            tokenizer = str(tmp_path / "tokenizer.json")
            (tmp_path / "tokenizer.json").write_text(text_data.text_tokens.Bytes().to_json())
        refused(folder, r"bad\.txt: byte 501 is no UTF-8; tokenizer='bytes' takes any file", tokenizer=tokenizer)
    assert b"\xe9t\xe9" in b"".join(everything(texts(task_of(folder, tmp_path))))


def test_a_folder_that_cannot_hold_the_tokens_says_so(folder, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match=r"Text: .*cache.*: Not a directory"):
        task_of(folder, tmp_path).count("iid")


def test_the_progress_of_long_work_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(text_writer, "QUIET_SECONDS", 0.0)
    with text_writer.Progress("tokenising x", 0, 10_000_000) as progress:
        progress.show(4_000_000)
    assert capsys.readouterr().err == "text: tokenising x: 4 of 10 MB\n"
    assert json.loads(text_writer.as_json({"b": 1, "a": [2]})) == {"a": [2], "b": 1}
