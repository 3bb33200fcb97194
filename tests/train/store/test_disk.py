"""A run pauses while the disk fails; its result is the same as without the failure."""

import contextlib
import errno
import os
import pathlib
import signal
from unittest import mock

import pytest
from run_folders import full_disk, names, same, steps

from polyhead.train import Interrupted, run
from polyhead.train.stop import StopSignals
from polyhead.train.store import disk
from polyhead.train.store.folder import Metrics, read_metrics


class Rest:
    """Replaces `disk.sleep`: counts the calls, and calls `mend` at the last of `rests`."""

    def __init__(self, monkeypatch, rests, mend):
        self.left, self.mend, self.rests = rests, mend, 0
        monkeypatch.setattr(disk, "sleep", self)

    def __call__(self, seconds):
        self.rests += 1
        self.left -= 1
        assert self.left >= 0
        if self.left == 0:
            self.mend()


@pytest.mark.parametrize("room", ["for no checkpoint", "for half a row"])
def test_a_full_disk_is_a_pause(tiny, tmp_path, whole, at_step, monkeypatch, capsys, room):
    """It fills up in step 7.  Two attempts, then it has room again."""
    limit, rows = contextlib.ExitStack(), tmp_path / "metrics.jsonl"
    size = {"for no checkpoint": lambda: 20_000, "for half a row": lambda: rows.stat().st_size + 50}[room]
    at_step(7, lambda: limit.enter_context(full_disk(size())))
    rest = Rest(monkeypatch, 2 * disk.SECONDS, limit.close)
    with limit:
        run(tiny(tmp_path), progress=False)
    name, why = "checkpoint.safetensors", "File too large"
    if room == "for half a row":
        name, why = "metrics.jsonl", "No space left on device"
    assert capsys.readouterr().err.splitlines() == [
        f"paused: {tmp_path / name}: cannot be written ({why}); tried again every 30 s until the disk works",
        "the disk works again: continuing",
    ]
    assert rest.left == 0
    same(tmp_path, whole)
    assert rows.read_bytes().count(b"\n") == (whole / "metrics.jsonl").read_bytes().count(b"\n")


@pytest.mark.parametrize(("call", "code"), [("fsync", "ESTALE"), ("replace", "EDQUOT")])
def test_a_failing_disk_is_a_pause(tiny, tmp_path, whole, at_step, monkeypatch, call, code):
    """From step 3 on the first `call` for each file fails: rows, checkpoints, their links, the result."""
    plain, number, failed = getattr(os, call), getattr(errno, code), []

    def failing(*args):
        path = os.readlink(f"/proc/self/fd/{args[0]}") if call == "fsync" else str(args[1])
        if path not in failed and not os.path.isdir(path):
            failed.append(path)
            raise OSError(number, os.strerror(number))
        plain(*args)

    at_step(3, lambda: monkeypatch.setattr(os, call, failing))
    monkeypatch.setattr(disk, "sleep", lambda seconds: None)
    run(tiny(tmp_path), progress=False)
    same(tmp_path, whole)
    wanted = {"fsync": "metrics.jsonl", "replace": "result.json"}[call]
    assert {"checkpoint.safetensors", wanted} <= {pathlib.Path(path).name.removesuffix(".partial") for path in failed}


def test_a_missing_share_is_a_pause(tiny, tmp_path, whole, at_step, monkeypatch, capsys):
    """Of the open file only a stale handle is left, as over NFS."""
    folder, away = tmp_path / "run", tmp_path / "away"

    def leave():
        folder.rename(away)

    at_step(7, leave)
    Rest(monkeypatch, disk.SECONDS, lambda: away.rename(folder))
    run(tiny(folder), progress=False)
    assert "No such file or directory" in capsys.readouterr().err
    same(folder, whole)


def test_lost_rows_take_no_others_with_them(tmp_path, capsys):
    """A share comes back without the data that were not on its disk: the loss is reported, and later rows are whole."""
    metrics = Metrics(tmp_path, lambda row: True)
    for step in (1, 2):
        metrics.add({"kind": "train", "step": step})
    metrics.close()
    os.truncate(metrics.path, metrics.path.stat().st_size - 5)
    metrics.add({"kind": "train", "step": 3})
    metrics.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]
    assert capsys.readouterr().err == f"{metrics.path}: the last rows were lost with the disk\n"


def test_permanent_errors_are_raised(tiny, tmp_path, at_step, monkeypatch):
    refused = mock.Mock(side_effect=OSError(errno.EACCES, "Permission denied"))
    at_step(7, lambda: monkeypatch.setattr(os, "replace", refused))
    Rest(monkeypatch, 0, lambda: None)
    with pytest.raises(OSError, match=r"checkpoint\S+: cannot be written \(Permission denied\)$"):
        run(tiny(tmp_path), progress=False)
    assert steps(tmp_path)[0] == 5


def test_a_signal_ends_the_pause(tiny, tmp_path, whole, at_step, monkeypatch):
    with contextlib.ExitStack() as limit:
        at_step(7, lambda: limit.enter_context(full_disk(20_000)))
        Rest(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        text = r"^stopped, not saved: \S+: cannot be written \(File too large\); what was saved before is kept$"
        with pytest.raises(Interrupted, match=text):
            run(tiny(tmp_path), progress=False)
    assert steps(tmp_path)[0] == 5
    assert not [one for one in names(tmp_path) if "partial" in one]
    run(tiny(tmp_path), progress=False, resume=True)
    same(tmp_path, whole)


def test_of_processes_that_wait_for_one_disk_one_says_so(monkeypatch, capsys):
    left = [OSError(28, "full")]

    def write():
        if left:
            raise left.pop()

    monkeypatch.setattr(disk, "sleep", lambda seconds: None)
    disk.DiskRetry(StopSignals(), speaks=False)(write)
    assert capsys.readouterr().err == ""
