"""The state that a sweep's table gives for every kind of run; unexpected files, which stop no other run."""

import json
import os
import shutil
import signal
import types
from dataclasses import replace

from fake_workers import Fake, leave

from polyhead import train
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.engines import LOG
from polyhead.scale.sweep.job import Job
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.status import place_of, status
from polyhead.train import Result
from polyhead.train.__main__ import main
from polyhead.train.stop import HELD, INTERRUPTED, MISTAKE
from polyhead.train.store.claims import LOCK, claim
from polyhead.train.store.folder import METRICS
from polyhead.train.store.state import ENDED, State, write_end


def test_all_states(tiny, tmp_path):
    """With the fields in which the runs differ."""
    runs = [tiny(None, name="r", seed=seed, evaluate=("compositional", "iid")) for seed in range(10)]
    places = [place_of(run, tmp_path) for run in runs]
    done, running, broken, stopped, waiting, elsewhere, retrying, late, empty, damaged = places
    train.run(replace(runs[0], folder=str(done)), progress=False)
    for place in (running, broken, stopped, elsewhere, retrying, late, empty, damaged):
        place.mkdir()
    for place in (running, broken, stopped):
        (place / METRICS).write_text(json.dumps({"kind": "train", "step": 5, "loss": 0.1}) + "\n")
    write_end(broken, State.FAILED, "train: the loss of r is nan at step 6")
    write_end(stopped, State.STOPPED, "stopped and saved at step 5; resume with: polyhead resume x")
    write_end(retrying, State.RETRYING, "(1 of 2): killed by signal 9")
    (late / LOG).write_text("polyhead: run folder: another process is training in it\n")
    (damaged / ENDED).write_bytes(b"{")
    with claim(runs[1], running), claim(runs[5], elsewhere):
        (elsewhere / LOCK).write_text("node7 123\n")
        rows = status(runs, tmp_path)
    assert [row["state"] for row in rows] == [
        *("done", "running", "failed", "stopped", "waiting"),
        *("elsewhere", "retrying", "stopped", "waiting", "waiting"),
    ]
    assert [row["step"] for row in rows] == ["12/12", "5/12", "5/12", "5/12", *["0/12"] * 6]
    assert [row["seed"] for row in rows] == [*range(10)]
    assert rows[0].keys() == {"run", "seed", "state", "step", ""}
    score, *details = (row[""] for row in rows)
    assert score.startswith("compositional r2 ")
    nan, killed = "train: the loss of r is nan at step 6", "(1 of 2): killed by signal 9"
    assert details == ["", nan, "", "", "on node7", killed, "", "", ""]
    assert status(runs, tmp_path)[1]["state"] == "stopped"  # its claim has ended
    assert not waiting.exists()  # looking leaves no folder behind


def test_a_run_without_evaluations_is_done_without_a_score(tiny, tmp_path):
    run = tiny(None, evaluate=())
    place_of(run, tmp_path).mkdir()
    leave(run, place_of(run, tmp_path))
    assert status([run], tmp_path) == [{"run": "tiny", "state": "done", "step": "12/12", "": ""}]


def test_a_worker_notes_how_it_ended(tiny, tmp_path, at_step, capsys):
    """It failed, or was stopped.  While another one trains, a worker notes nothing; a new start deletes the note."""
    runs = [tiny(None, name="bad", lr=1e38, warmup=0), tiny(None, name="r")]
    for run in runs:
        with claim(run, place_of(run, tmp_path)):
            pass
    at_step(7, lambda: os.kill(os.getpid(), signal.SIGINT))
    with claim(runs[1], place_of(runs[1], tmp_path)):
        assert main([str(place_of(runs[1], tmp_path))]) == HELD
    assert not (place_of(runs[1], tmp_path) / ENDED).exists()
    assert [main([str(place_of(run, tmp_path) / "config.json")]) for run in runs] == [MISTAKE, INTERRUPTED]
    failed, stopped = status(runs, tmp_path)
    assert (failed["state"], stopped["state"], stopped["step"], stopped[""]) == ("failed", "stopped", "8/12", "")
    assert failed[""].startswith("train: the loss of bad is nan at step 2; ")
    assert main([str(place_of(runs[1], tmp_path))]) == 0
    assert not (place_of(runs[1], tmp_path) / ENDED).exists()
    assert capsys.readouterr().err.count("polyhead: ") == 3


def test_the_error_of_a_missing_file_names_it(tiny, tmp_path, at_step, capsys):
    run, missing = tiny(None), tmp_path / "missing"
    place = place_of(run, tmp_path)
    with claim(run, place):
        pass
    at_step(1, lambda: missing.read_text())
    assert main([str(place), "--quiet"]) == 1
    assert capsys.readouterr().err == f"polyhead: {missing}: No such file or directory\n"


def test_a_run_that_another_process_has_finished_shows_its_last_rows(tiny, tmp_path):
    """Between two looks at the folder, the other process wrote rows and the result."""
    run = tiny(tmp_path)

    def write(*rows):
        with open(tmp_path / METRICS, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"steps_per_second": 4.0, **row}) + "\n" for row in rows)

    for then in (Job.ready, Job.look):
        write({"kind": "train", "step": 1, "loss": 0.75})
        job = Job(run, tmp_path)
        assert (job.step, job.outcome) == (1, None)
        write({"kind": "train", "step": 12, "loss": 0.25}, {"kind": "eval", "step": 12, "split": "iid", "r2": 0.5})
        leave(run, tmp_path)
        then(job)
        assert job.text() == "loss 0.2500  iid r2 0.500  done in 0:06"
        for name in (METRICS, "result.json"):
            (tmp_path / name).unlink()


# -------------------------------------------------------------------------------------------------- unexpected files
def test_folders_that_cannot_be_written_to_fail_alone(tiny, tmp_path):
    runs = [tiny("unused", seed=seed) for seed in range(4)]
    log, config, file, _ = places = [place_of(run, tmp_path) for run in runs]
    (log / LOG).mkdir(parents=True)
    (config / "config.json.partial").mkdir(parents=True)
    file.touch()
    found = sweep(runs, tmp_path, engine=Fake(), progress=False)
    said = ["worker.log: cannot be written (Is a directory)", "config.json: cannot be written (Is a directory)"]
    assert found[:2] == [Failure("tiny", at, 1, f"{at}/{text}") for at, text in zip(places, said, strict=False)]
    assert found[2] == Failure("tiny", file, 2, f"run folder: {file} cannot be made (File exists)")
    assert isinstance(found[3], Result)


def test_a_result_of_another_run_is_none(tiny, tmp_path):
    mine, other = runs = [tiny("unused", seed=seed) for seed in range(2)]
    sweep([other], tmp_path, engine=Fake(), progress=False)
    shutil.copytree(place_of(other, tmp_path), place_of(mine, tmp_path), ignore=shutil.ignore_patterns(LOG))
    assert [row["state"] for row in status(runs, tmp_path)] == ["waiting", "done"]
    failed, done = sweep(runs, tmp_path, engine=Fake(), progress=False)
    assert isinstance(done, Result)
    assert failed.error.startswith(f"run folder: {place_of(mine, tmp_path)} already holds another run")


def test_one_that_has_died_for_the_last_time_is_not_shown_as_tried_again(tiny, tmp_path):
    runs = [tiny("unused", seed=seed) for seed in range(2)]
    sweep(runs, tmp_path, engine=Fake({1: [-9, -9]}), retries=1, progress=False)
    rows = status(runs, tmp_path)
    assert [(row["state"], row[""]) for row in rows] == [("done", ""), ("failed", "killed by signal 9 (2 times)")]


def test_rows_that_are_none_are_not_shown(tiny, tmp_path):
    job, row = Job(tiny(tmp_path), tmp_path), {"kind": "train", "step": 3, "loss": 0.5, "steps_per_second": 4.0}
    bad = [{"step": "7"}, {"step": float("inf")}, {"steps_per_second": "fast"}, {"steps_per_second": float("nan")}]
    bad += [{"step": 9, "seal": 1}, {"loss": None}]
    lines = [json.dumps(row | one) for one in bad] + ["[" * 100_000, "3", json.dumps(row)]
    (tmp_path / METRICS).write_text("\n".join(lines) + "\n")
    job.poll()
    job.training = True
    assert (job.step, job.text()) == (3, "loss 0.5000  4.0 steps/s  0:02 left")


def test_a_run_is_running_when_its_worker_has_written_a_row(tiny, tmp_path):
    job, row = Job(tiny(tmp_path), tmp_path), {"kind": "train", "step": 1, "loss": 0.5, "steps_per_second": 4.0}
    assert job.ready()
    job.handle = types.SimpleNamespace(code=lambda: None)
    assert not job.poll()
    assert job.state == State.WAITING
    (tmp_path / METRICS).write_text(json.dumps(row) + "\n")
    assert not job.poll()
    assert job.state == State.RUNNING
