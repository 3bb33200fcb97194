"""Trackers beside metrics.jsonl, and callbacks: they get every row; a tracker's error never ends the run."""

import importlib.machinery
import sys
from unittest import mock

import pytest
from tiny_runs import crashed

import polyhead as ph
from polyhead.train.store.folder import read_metrics


@pytest.fixture
def wandb(monkeypatch):
    """A package that looks like wandb, and records all calls."""
    module = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec("wandb", None, origin="wandb.py"))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def numbers(folder):
    """The numbers of metrics.jsonl, by step and by name in a tracker, such as iid/r2; without the time of steps."""
    expected = {}
    for row in read_metrics(folder):
        prefix = row.get("split", "training")
        for key, value in row.items():
            if key not in ("kind", "split", "step") and "second" not in key:
                expected[row["step"], f"{prefix}/{key}"] = value
    return expected


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tiny, tmp_path, wandb):
    run = tiny(tmp_path, track=("wandb", "wandb"))
    crashed(run, 8)
    ph.train.run(run, progress=False, resume=True)
    sent = {}
    for call in wandb.init.return_value.log.call_args_list:
        values = dict(call.args[0])
        step = values.pop("step")
        sent |= {(step, name): value for name, value in values.items() if "second" not in name}
    assert sent == numbers(tmp_path)
    assert [call.kwargs["id"] for call in wandb.init.call_args_list] == 2 * [ph.digest(run)]
    assert wandb.init.return_value.finish.call_count == 2


@pytest.mark.parametrize("fails", ["init", "init.return_value.log", "init.return_value.finish"])
def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(fails, tiny, tmp_path, wandb, capfd):
    wandb.configure_mock(**{f"{fails}.side_effect": RuntimeError("no luck\ntoday")})
    assert ph.train.run(tiny(tmp_path, track=("wandb",)), progress=False).steps == 12
    assert capfd.readouterr().err == "polyhead: tracking: wandb is off for this run (no luck today)\n"


def test_unknown_and_missing_trackers_are_refused_before_training(tiny, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="tracking: unknown tracker 'wand'; did you mean 'wandb'"):
        ph.train.run(tiny(tmp_path / "run", track=("wand",)))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wandb").mkdir()  # the files of an earlier tracking are no package
    monkeypatch.setattr(importlib.machinery.FileFinder, "find_spec", lambda *_: None)
    with pytest.raises(ValueError, match="tracking: wandb is not installed: pip install wandb, or leave it out"):
        ph.train.run(tiny(tmp_path / "run", track=("wandb",)))
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")  # warnings of tensorboard
def test_tensorboard_has_each_row_once(tiny, tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    run = tiny(tmp_path, track=("tensorboard",))
    crashed(run, 8)
    ph.train.run(run, progress=False, resume=True)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    sent = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            if "second" not in name:
                assert (event.step, name) not in sent
                sent[event.step, name] = event.value
    assert sent == pytest.approx(numbers(tmp_path), rel=1e-6)


def test_callbacks_get_every_row_and_may_end_the_run(tiny, tmp_path):
    rows = []
    ph.train.run(tiny(tmp_path / "a", log_every=5), progress=False, callbacks=[rows.append])
    assert rows == read_metrics(tmp_path / "a")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 5, 10, 12]

    def end_at_seven(row):
        if row["step"] == 7:
            raise RuntimeError("enough")

    with pytest.raises(ValueError, match="callbacks must be a list of functions, got <list_iterator"):
        ph.train.run(tiny(tmp_path / "b"), progress=False, callbacks=iter([rows.append]))
    with pytest.raises(RuntimeError, match="enough"):
        ph.train.run(tiny(tmp_path / "b"), progress=False, callbacks=[end_at_seven])
    assert ph.train.run(tiny(tmp_path / "b"), progress=False, resume=True).steps == 12
