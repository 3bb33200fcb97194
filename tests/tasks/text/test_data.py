"""Token files: every byte is in one split, a killed process resumes, damage is found, no work is repeated."""

import os
import threading

import numpy as np
import pytest
from texts import contents, everything, killed_at, place_of, task_of, texts

from polyhead.tasks.text import data as text_data, sources as text_sources, writer as text_writer
from polyhead.tasks.text.sources import Files
from polyhead.tasks.text.writer import CorpusWriter

pytestmark = pytest.mark.usefixtures("afresh")


# --------------------------------------------------------------------------------------------------------------- killed
def asked(monkeypatch):
    """Where reading begins, each time that it does."""
    first, pieces = [], Files.pieces

    def noted(self, start=0, read=0):
        first.append(start)
        return pieces(self, start, read)

    monkeypatch.setattr(Files, "pieces", noted)
    return first


@pytest.mark.parametrize("harm", ["none", "lost", "flipped", "journal", "header"])
def test_an_interrupted_process_resumes_and_trusts_only_its_journal(harm, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_data, "STRETCH", 20_000)
    task_of(folder, tmp_path, "whole").count("iid")
    task, first = task_of(folder, tmp_path), asked(monkeypatch)
    for ends in range(40):
        with killed_at():
            task.count("iid")
        place = place_of(tmp_path)
        if (place / "manifest.json").exists():
            break
        (journal,), (row,) = place.glob("*.journal"), place.glob("*.train.bin")
        if ends == 3 and harm == "flipped":
            flip(row)
        elif ends == 3 and harm == "lost":
            os.truncate(row, row.stat().st_size - 1)
        elif ends == 3 and harm != "none":
            journal.write_bytes(b"{}\n{}\n" if harm == "header" else b"{" + journal.read_bytes())
        else:
            for path, more in ((row, b"more than the journal knows"), (journal, b'{"pieces": 1')):
                path.write_bytes(path.read_bytes() + more)
    assert contents(place) == contents(place_of(tmp_path, "whole"))
    assert ends > 5
    assert first == sorted(first) if harm == "none" else first.count(0) == 2
    assert ("beginning anew" in capsys.readouterr().err) == (harm in ("lost", "flipped"))


@pytest.mark.parametrize("known", [True, False])
def test_a_tokenizer_that_the_journal_does_not_know_is_trained_again(known, folder, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    task_of(folder, tmp_path, "whole", tokenizer="bpe:280").count("iid")
    task = task_of(folder, tmp_path, tokenizer="bpe:280")
    with killed_at():
        task.count("iid")
    if not known:
        next(place_of(tmp_path).glob("*.tokenizer.json")).write_text(text_data.text_tokens.Bytes().to_json())
    first = asked(monkeypatch)
    task.count("iid")
    assert len(first) == 1 + (not known)  # training reads the text, too
    assert contents(place_of(tmp_path)) == contents(place_of(tmp_path, "whole"))


# --------------------------------------------------------------------------------------------------------------- damage
def flip(path, *, told=False):
    """Another bit of a file; its time does not tell unless `told`."""
    data, stat = bytearray(path.read_bytes()), path.stat()
    data[50] ^= 1
    path.write_bytes(data)
    if not told:
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
    flip(next(place_of(tmp_path).glob("*.train.bin")), told=True)
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


def test_a_new_task_reads_text_that_was_edited_meanwhile_and_an_old_one_what_it_read(folder, tmp_path):
    old = task_of(folder, tmp_path)
    before, tokens = old.fingerprint(), old._corpus().tokens["train"].tolist()
    with (folder / "2.txt").open("a") as handle:
        handle.write("one more line\n")
    new = task_of(folder, tmp_path)
    assert new == old
    assert "one more line" in b"".join(everything(texts(new))).decode()
    assert (old.fingerprint(), old._corpus().tokens["train"].tolist()) == (before, tokens)


def test_two_processes_may_make_the_folder_at_once(tmp_path, monkeypatch):
    place = tmp_path / "cache" / "text"
    monkeypatch.setattr(text_data.pathlib.Path, "exists", lambda path: False)  # so it seems to the slower one
    for _ in range(2):
        text_data._prepare(place, place.parent)
    assert place.is_dir()


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


def test_tokens_take_as_few_bytes_as_they_can_and_the_fingerprint_is_of_the_text(folder, tmp_path):
    pytest.importorskip("tokenizers")
    plain, trained = task_of(folder, tmp_path), task_of(folder, tmp_path, tokenizer="bpe:290")
    assert plain._corpus().tokens["train"].dtype == np.uint8
    assert trained._corpus().tokens["train"].dtype == np.uint16
    assert plain.fingerprint() == trained.fingerprint() != task_of(folder, tmp_path, held_out=0.1).fingerprint()
    moved = task_of(folder.rename(tmp_path / "elsewhere"), tmp_path, "other")
    assert moved.fingerprint() == plain.fingerprint()
    large = text_data.text_tokens.Bytes()
    large.count = 70_000
    assert CorpusWriter(tmp_path, "x", large).dtype == np.uint32


def test_the_progress_of_long_work_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(text_writer, "QUIET_SECONDS", 0.0)
    with text_writer.TokenisingProgress("tokenising x", 0, 10_000_000) as progress:
        progress.show(4_000_000)
    assert capsys.readouterr().err == "text: tokenising x: 4 of 10 MB\n"
