"""Trackers beside metrics.jsonl: each row once after any interruption; tracker errors never affect the run."""

import importlib.machinery
import importlib.util
import inspect
import json
import operator
import struct
import sys
import threading
from typing import Any
from unittest import mock

import forked
import pytest
from tiny_runs import crashed

import polyhead as ph
from polyhead.train import tracking


def fake(monkeypatch, name):
    """A package that looks like all three trackers, and records all calls in order."""
    module = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, name, module)
    if name == "tensorboard":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return module


def told(module):
    """All numbers, by step and name, in the order in which they came."""
    numbers = []
    for call, given, how in module.mock_calls:
        if call.endswith(".add_scalar"):
            numbers.append((given[2], given[0], given[1]))
        if call.endswith(".log"):
            values = {**given[0], **how}
            step = values.pop("step")
            numbers += [(step, name, value) for name, value in values.items()]
    return numbers


def starts(module):
    return [call.kwargs for call in module.init.call_args_list]


def written(folder):
    """The same of metrics.jsonl and result.json."""
    numbers = []
    for row in ph.train.store.folder.read_metrics(folder):
        head = row.get("split", "training")
        numbers += [(row["step"], f"{head}/{k}", v) for k, v in row.items() if k not in ("kind", "step", "split")]
    result = json.loads((folder / "result.json").read_text())
    scores = [(f"result/{split}/{name}", v) for split, of in result["scores"].items() for name, v in of.items()]
    scores += [(f"result/{name}", result[name]) for name in ("seconds", "parameters")]
    return numbers + [(result["steps"], name, value) for name, value in scores]


@pytest.mark.parametrize("name", tracking.TRACKERS)
def test_a_resumed_run_sends_each_row_once(name, tiny, tmp_path, monkeypatch, capfd):
    module = fake(monkeypatch, name)
    run = tiny(tmp_path, track=(name, name))
    crashed(run, 8)
    before = told(module)
    assert max(step for step, _, _ in before) == 8  # and the checkpoint is of step 5
    ph.train.run(run, progress=False, resume=True)

    def steady(numbers):
        return [number for number in numbers if "second" not in number[1]]  # repeated steps take another time

    assert sorted(steady(told(module))) == sorted(steady(written(tmp_path)))
    assert told(module)[: len(before)] == before
    assert module.init.call_count + module.SummaryWriter.call_count == 2
    if name != "tensorboard":
        first, again = starts(module)
        assert [first["resume"], again["resume"]] == [{"wandb": None, "trackio": "never"}[name], "allow"]
        assert ph.digest(run) in first.get("id", first["name"]) == again.get("id", again["name"])
        assert first["config"] == ph.config.to_dict(run)
    if name == "wandb":
        assert module.init.return_value.finish.mock_calls == [mock.call(exit_code=1), mock.call(exit_code=0)]
    assert name in (tmp_path / "config.json").read_text()  # a resumed run has the same trackers
    calls = len(module.mock_calls)
    ph.train.run(run, progress=False)  # finished: nothing is sent
    assert len(module.mock_calls) == calls
    assert capfd.readouterr().err == ""


def test_tracked_from_the_middle_on_and_anew(tiny, tmp_path, monkeypatch):
    module = fake(monkeypatch, "trackio")
    run = tiny(tmp_path, track=("trackio",))
    ph.train.run(tiny(tmp_path), progress=False)
    (tmp_path / "result.json").unlink()  # the checkpoint is of the last step
    ph.train.run(run, progress=False, resume=True)
    assert told(module) == written(tmp_path)
    count = len(told(module))
    ph.train.run(run, progress=False, again=True)
    assert told(module)[count:] == written(tmp_path)
    assert [given["resume"] for given in starts(module)] == ["never", "never"]


def test_a_corrected_run_in_the_folder_of_another_sends_all_rows(tiny, tmp_path, monkeypatch):
    """The other was killed before its first checkpoint, so the folder is free; rows of both have the same names."""
    module = fake(monkeypatch, "tensorboard")
    crashed(tiny(tmp_path, track=("tensorboard",), lr=0.1), 4)
    (tmp_path / "bad_batch.safetensors").write_bytes(b"of that run")
    count = len(told(module))
    assert count
    ph.train.run(tiny(tmp_path, track=("tensorboard",)), progress=False)
    assert told(module)[count:] == written(tmp_path)
    assert not (tmp_path / "bad_batch.safetensors").exists()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("fails", ["init", "init.return_value.log", "init.return_value.finish"])
@pytest.mark.parametrize("error", [RuntimeError("no luck\ntoday"), SystemExit(3)], ids=["error", "exit"])
def test_no_tracker_stops_a_run(fails, error, tiny, tmp_path, monkeypatch, capfd):
    bad, good = (fake(monkeypatch, name) for name in ("wandb", "trackio"))
    bad.configure_mock(**{f"{fails}.side_effect": error})
    result = ph.train.run(tiny(tmp_path, track=("wandb", "trackio")), progress=False)
    assert result.steps == 12
    assert told(good) == written(tmp_path)
    said = capfd.readouterr().err.splitlines()
    why = "RuntimeError: no luck today" if isinstance(error, RuntimeError) else "SystemExit: 3"
    assert said == [f"polyhead: tracking: wandb is off for this run ({why})"]
    assert operator.attrgetter(fails)(bad).call_count == 1  # off means off


def test_an_import_that_fails(tiny, tmp_path, monkeypatch, capfd):
    (tmp_path / "trackio.py").write_text("raise OSError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    assert ph.train.run(tiny(tmp_path / "run", track=("trackio",)), progress=False).steps == 12
    assert capfd.readouterr().err == "polyhead: tracking: trackio is off for this run (OSError: half installed)\n"


def test_a_tracker_that_hangs_is_left_behind(tiny, tmp_path, monkeypatch, capfd):
    run, release = fake(monkeypatch, "wandb").init.return_value, threading.Event()
    run.log.side_effect = lambda values: release.wait()
    monkeypatch.setattr(tracking, "PATIENCE", 0.0)
    assert ph.train.run(tiny(tmp_path / "a", track=("wandb",)), progress=False).steps == 12
    assert capfd.readouterr().err == "polyhead: tracking: wandb is off for this run (it does not finish in 0 s)\n"
    monkeypatch.setattr(tracking, "BEHIND", 3)
    assert ph.train.run(tiny(tmp_path / "b", track=("wandb",)), progress=False).steps == 12
    assert capfd.readouterr().err == "polyhead: tracking: wandb is off for this run (it is 3 rows behind)\n"
    release.set()
    for thread in [one for one in threading.enumerate() if one.name.startswith("tracking")]:
        thread.join()
    assert run.log.call_count <= 2  # one in each run: neither is told more, nor finished
    assert not run.finish.called


def test_unknown_and_missing_trackers_are_seen_before_training(tiny, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="tracking: unknown tracker 'wand'; did you mean 'wandb'"):
        ph.train.run(tiny(tmp_path / "run", track=("wand",)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tracking: wandb is not installed: pip install wandb, or leave it out"):
        ph.train.run(tiny(tmp_path / "run", track=("wandb",)))
    assert not (tmp_path / "run").exists()


def test_nothing_is_imported_unless_it_is_chosen(tiny, tmp_path):
    for name in tracking.TRACKERS:
        (tmp_path / f"{name}.py").write_text(f"print('imported {name}')")
    code = (
        "import sys; from polyhead.train import *; sys.path.insert(0, sys.argv[1])\n"
        f"[sys.modules.pop(name, None) for name in {[*tracking.TRACKERS]!r}]\n"
        "[run(read_config(path), progress=False) for path in sys.argv[2:]]"
    )
    places = [tmp_path / name for name in ("plain.json", "tracked.json")]
    for track, place in zip([(), ("trackio",)], places, strict=True):
        ph.config.save(tiny(place.with_suffix(""), steps=1, track=track), place)
    ended, said = forked.run(code, tmp_path, *places)
    assert (ended, said.splitlines()[0], said.count("imported")) == (0, "imported trackio", 1)
    assert (tmp_path / "plain" / "result.json").exists()


# ------------------------------------------------------------------------------------------------------- the real ones
@pytest.fixture
def twice(tiny, tmp_path, monkeypatch, capfd):
    """Train with a tracker, crash at step 8, resume; the folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))

    def train(name):
        folder, run = tmp_path / "run", tiny(tmp_path / "run", track=(name,))
        crashed(run, 8)
        ph.train.run(run, progress=False, resume=True)
        assert capfd.readouterr().err == ""
        return folder

    return train


@pytest.mark.filterwarnings("ignore")  # not ours to mend
def test_tensorboard(twice):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = twice("tensorboard")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    found = [(e.step, name, e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name)]
    _same(found, written(folder))
    assert "config/text_summary" in events.Tags()["tensors"]


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(twice):
    pytest.importorskip("wandb")
    folder = twice("wandb")
    importlib.import_module("wandb").teardown()  # as at the end of the process: it writes the rest
    _same(_offline(folder / "wandb"), written(folder))


@pytest.mark.filterwarnings("ignore")
def test_trackio(twice):
    trackio = pytest.importorskip("trackio", exc_type=ImportError)
    from trackio.sqlite_storage import SQLiteStorage

    if "resume" not in inspect.signature(trackio.init).parameters:
        pytest.skip(f"trackio {trackio.__version__} cannot go on with a run")
    folder = twice("trackio")
    (name,) = SQLiteStorage.get_runs("polyhead")
    logs = SQLiteStorage.get_logs("polyhead", name)
    _same([(log["step"], key, value) for log in logs for key, value in log.items() if "/" in key], written(folder))


def _same(found, wanted):
    """Every number once, in float32; how long steps took aside."""
    short = [{(step, name): value for step, name, value in one if "second" not in name} for one in (found, wanted)]
    assert len(found) == len(wanted)
    assert short[0].keys() == short[1].keys()
    assert list(short[0].values()) == pytest.approx([short[1][key] for key in short[0]], rel=1e-6)


def _offline(place):
    """The history of all parts of a run that is not synchronised yet."""
    from wandb.proto import wandb_internal_pb2

    numbers = []
    for path in sorted(place.glob("offline-run-*/*.wandb")):
        for data in _records(path.read_bytes()):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            numbers += [(items["step"], name, value) for name, value in items.items() if "/" in name]
    return numbers


def _records(data):
    """A log of LevelDB with a head of 7 bytes: blocks of 32 KiB of pieces: checksum, length, kind, and bytes."""
    block, place, whole = 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the only piece, the last piece
            yield whole
            whole = b""


def test_callbacks_are_told_every_row_and_may_end_the_run(tiny, tmp_path):
    told = []
    ph.train.run(tiny(tmp_path / "a", log_every=5), progress=False, callbacks=[told.append])
    assert told == [
        {name: row[name] for name in told[i]}
        for i, row in enumerate(ph.train.store.folder.read_metrics(tmp_path / "a"))
    ]
    assert [row["step"] for row in told if row["kind"] == "train"] == [1, 5, 10, 12]

    def enough(row):
        if row["step"] == 7:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        ph.train.run(tiny(tmp_path / "b"), progress=False, callbacks=[enough])
    assert ph.train.run(tiny(tmp_path / "b"), progress=False, resume=True).steps == 12
