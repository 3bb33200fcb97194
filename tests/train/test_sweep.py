"""Many runs in workers of their own: a crash stays alone, what is done stays done, Ctrl-C leaves nobody behind."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

import polyhead as ph
from polyhead.train import Failure, Interrupted, Result
from polyhead.train.sweep import _Screen, _Worker, sweep

Tiny = Callable[..., Any]


def test_results_failures_and_what_is_done(tiny: Tiny, tmp_path: pathlib.Path, capfd: Any, monkeypatch: Any):
    good, bad = tiny("unused"), tiny("unused", name="bad", lr=1e38, warmup=0)
    failed, done = sweep([bad, good], tmp_path, workers=2, threads=1)
    assert isinstance(failed, Failure)
    assert isinstance(done, Result)
    assert (failed.name, failed.code) == ("bad", 2)
    assert failed.error.startswith("train: the loss of bad is nan at step 2")
    assert done.folder == tmp_path / f"tiny-{ph.digest(good)}"
    assert done.environment["threads"] == 1
    said = capfd.readouterr().err
    assert f"tiny: started ({done.folder})" in said
    assert "bad: failed: train: the loss" in said
    assert "compositional r2" in said
    # Again: the finished run is not started.
    monkeypatch.setattr("polyhead.train.sweep.subprocess.Popen", None)
    assert sweep([good], tmp_path) == [done]
    assert "tiny: already done" in capfd.readouterr().err
    with pytest.raises(TypeError):  # now it would be
        sweep([good], tmp_path, again=True)


def test_ctrl_c_saves_every_worker(tiny: Tiny, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    run = tiny("unused", steps=1_000_000, save_every=1_000_000, eval_every=1_000_000)
    plain = _Screen.update
    workers: list[_Worker] = []

    def update(screen: _Screen) -> None:
        plain(screen)
        if not workers and screen.jobs[0].step > 0:  # it has written its first row
            workers[:] = screen.jobs
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Screen, "update", update)
        with pytest.raises(KeyboardInterrupt) as stop:
            sweep([run], tmp_path, progress=False)
    assert isinstance(stop.value, Interrupted)
    assert str(stop.value) == "stopped and saved; 0 of 1 runs are done, the same command goes on"
    assert workers[0].process.returncode == 130
    assert (workers[0].folder / "checkpoint.safetensors").exists()
    said = (workers[0].folder / "worker.log").read_text()
    assert "stopped and saved at step" in said
    assert "polyhead resume" in said


def test_the_follower_reads_whole_rows_and_a_file_that_shrank(tiny: Tiny, tmp_path: pathlib.Path):
    worker = _Worker(tiny(tmp_path), tmp_path)
    path = tmp_path / "metrics.jsonl"

    def row(step: int) -> str:
        return json.dumps({"kind": "train", "step": step, "loss": step / 10, "steps_per_second": 4.0})

    path.write_text(row(1) + "\n" + row(2)[:20])
    worker.poll()
    assert worker.step == 1
    path.write_text(row(1) + "\n" + row(2) + "\n")
    worker.poll()
    assert worker.step == 2
    assert worker.text() == "loss 0.2000  4.0 steps/s  0:02 left"
    path.write_text(row(1) + "\n")  # resumed from an earlier step
    worker.poll()
    assert worker.step == 1


def test_bad_sweeps(tiny: Tiny, tmp_path: pathlib.Path):
    run = tiny("unused")
    with pytest.raises(ValueError, match="sweep: the run 'tiny' occurs twice"):
        sweep([run, run], tmp_path)
    with pytest.raises(ValueError, match="sweep: workers must be at least 1 but is 0"):
        sweep([run], tmp_path, workers=0)
    assert not os.listdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"sweep: \S+file cannot be made \(File exists\)"):
        sweep([run], tmp_path / "file")
    assert sweep([], tmp_path) == []


@pytest.mark.parametrize(("field", "value"), [("scores", None), ("scores", {"iid": 0.5}), ("environment", [])])
def test_a_result_of_another_shape_is_one_line(field, value, tmp_path):
    fields = {"name": "a", "digest": "0", "steps": 1, "seconds": 1.0, "parameters": 1, "command": ""}
    written = {**fields, "scores": {}, "environment": {}, field: value}
    (tmp_path / "result.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"result\.json: not a result \(scores and environment must be tables\)"):
        ph.train.read_result(tmp_path)
