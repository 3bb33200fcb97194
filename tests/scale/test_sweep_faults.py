"""Unexpected files in the folder of one run never stop other runs, and never count as a result."""

import json
import pathlib
import shutil
import types
from collections.abc import Sequence
from typing import Any

import polyhead as ph
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.engines import LOG
from polyhead.scale.sweep.job import Job
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.status import status
from polyhead.train import Result
from polyhead.train.store.folder import METRICS, write_result
from polyhead.train.store.state import State


class Engine:
    """Its workers end at once, with a result or as killed."""

    pause, queues = 0.0, False

    def __init__(self, *kills: int) -> None:
        self.kills = kills

    def open(self, runs: Sequence[Any], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        return 1

    def start(self, folders: Sequence[pathlib.Path]) -> list[Any]:
        return [self._start(folder) for folder in folders]

    def _start(self, folder: pathlib.Path) -> Any:
        config, codes = ph.train.read_config(folder), [None, 0]
        if config.seed in self.kills:
            codes = [None, -9]
        else:
            write_result(Result(config.name, ph.digest(config), 12, 6.0, 1, {}, "", {}, folder))

        class Handle:
            def code(self) -> int | None:
                return codes.pop(0)

        return Handle()

    def stop(self, handles: Sequence[Any]) -> str:
        raise AssertionError

    def close(self) -> None: ...


def place(run: Any, folder: pathlib.Path) -> pathlib.Path:
    return folder / f"{run.name}-{ph.digest(run)}"


def test_folders_that_cannot_be_written_to_fail_alone(tiny: Any, tmp_path: pathlib.Path):
    runs = [tiny("unused", seed=seed) for seed in range(4)]
    log, config, file, _ = places = [place(run, tmp_path) for run in runs]
    (log / LOG).mkdir(parents=True)
    (config / "config.json.partial").mkdir(parents=True)
    file.touch()
    found = sweep(runs, tmp_path, engine=Engine(), progress=False)
    said = ["worker.log: cannot be written (Is a directory)", "config.json: cannot be written (Is a directory)"]
    assert found[:2] == [Failure("tiny", at, 1, f"{at}/{text}") for at, text in zip(places, said, strict=False)]
    assert found[2] == Failure("tiny", file, 2, f"run folder: {file} cannot be made (File exists)")
    assert isinstance(found[3], Result)


def test_a_result_of_another_run_is_none(tiny: Any, tmp_path: pathlib.Path):
    mine, other = runs = [tiny("unused", seed=seed) for seed in range(2)]
    sweep([other], tmp_path, engine=Engine(), progress=False)
    shutil.copytree(place(other, tmp_path), place(mine, tmp_path))
    assert [row["state"] for row in status(runs, tmp_path)] == ["waiting", "done"]
    failed, done = sweep(runs, tmp_path, engine=Engine(), progress=False)
    assert isinstance(done, Result)
    assert failed.error.startswith(f"run folder: {place(mine, tmp_path)} already holds another run")


def test_one_that_has_died_for_the_last_time_is_not_shown_as_tried_again(tiny: Any, tmp_path: pathlib.Path):
    runs = [tiny("unused", seed=seed) for seed in range(2)]
    sweep(runs, tmp_path, engine=Engine(1), retries=1, progress=False)
    rows = status(runs, tmp_path)
    assert [(row["state"], row[""]) for row in rows] == [("done", ""), ("failed", "killed by signal 9 (2 times)")]


def test_rows_that_are_none_are_not_shown(tiny: Any, tmp_path: pathlib.Path):
    job, row = Job(tiny(tmp_path), tmp_path), {"kind": "train", "step": 3, "loss": 0.5, "steps_per_second": 4.0}
    bad = [{"step": "7"}, {"step": float("inf")}, {"steps_per_second": "fast"}, {"steps_per_second": float("nan")}]
    bad += [{"step": 9, "seal": 1}, {"loss": None}]
    lines = [json.dumps(row | one) for one in bad] + ["[" * 100_000, "3", json.dumps(row)]
    (tmp_path / METRICS).write_text("\n".join(lines) + "\n")
    job.poll()
    job.training = True
    assert (job.step, job.text()) == (3, "loss 0.5000  4.0 steps/s  0:02 left")


def test_a_run_is_running_when_its_worker_has_written_a_row(tiny: Any, tmp_path: pathlib.Path):
    job, row = Job(tiny(tmp_path), tmp_path), {"kind": "train", "step": 1, "loss": 0.5, "steps_per_second": 4.0}
    assert job.ready()
    job.handle = types.SimpleNamespace(code=lambda: None)
    assert not job.poll()
    assert job.state == State.WAITING
    (tmp_path / METRICS).write_text(json.dumps(row) + "\n")
    assert not job.poll()
    assert job.state == State.RUNNING
