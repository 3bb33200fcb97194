"""Signals: the messages and actions of a run that is asked to stop, alone and under Slurm."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from run_folders import same

import polyhead
from polyhead.cli import dispatch as cli
from polyhead.train import Interrupted, run
from polyhead.train.__main__ import main
from polyhead.train.stop import Preempted, StopSignals, requeue
from polyhead.train.store.claims import claim
from polyhead.train.store.folder import read_metrics

MINE = ("SLURM_JOB_ID", "SLURM_PROCID", "SUBMITIT_EXECUTOR", "POLYHEAD_REQUEUE")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    """These tests may run inside a Slurm job."""
    for name in MINE:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Replaces Slurm's programs: they print a job's state and note their arguments; returns a reader of these notes."""

    def install(state="RUNNING", job="7", fails=False):
        place = tmp_path / "slurm"
        place.mkdir()
        notes = place / "notes"
        for name, does in (("squeue", f"echo {state}"), ("scontrol", "exit 1" if fails else "true")):
            (place / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {notes}\n{does}\n')
            (place / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", job)
        return lambda: notes.read_text().splitlines() if notes.exists() else []

    return install


# ---------------------------------------------------------------------------------------------------------------- stop
@pytest.mark.parametrize(
    ("number", "environment", "kind"),
    [
        (signal.SIGINT, {}, Interrupted),
        (signal.SIGTERM, {}, Interrupted),
        (signal.SIGUSR1, {}, Preempted),
        (signal.SIGINT, {"SLURM_JOB_ID": "7"}, Interrupted),
        (signal.SIGTERM, {"SLURM_JOB_ID": "7"}, Preempted),
        (signal.SIGTERM, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3"}, Preempted),
        (signal.SIGTERM, {"SLURM_JOB_ID": "7", "POLYHEAD_REQUEUE": "0"}, Interrupted),
    ],
)
def test_the_error_of_each_signal(number, environment, kind, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with StopSignals() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked == number
        raised = stop.interrupted("x")
    assert type(raised) is kind
    assert raised.code == (75 if kind is Preempted else 130)


def test_a_second_one_stops_at_once_but_the_end_of_a_grace_period_does_not():
    """Slurm sends SIGUSR1, a while later SIGTERM, in the end SIGKILL: a save that is going on may need all of it."""
    before = [signal.getsignal(number) for number in StopSignals.signals]
    with StopSignals() as stop:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert stop.asked == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in StopSignals.signals] == before


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
except BaseException:
    pass
"""


@pytest.mark.parametrize("words", [("-m", "polyhead.train", "."), ("-m", "polyhead", "resume", ".")])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGUSR1", 75)])
def test_a_signal_while_libraries_are_imported_is_not_lost(words, name, code, tmp_path, slurm, monkeypatch):
    notes = slurm()
    (tmp_path / "torch.py").write_text(SWALLOWS.format(name=name))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{pathlib.Path(polyhead.__file__).parents[1]}")
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    said = ["polyhead: stopped at once; what was saved before is kept", "polyhead: job 7 is queued again"]
    assert (done.returncode, done.stderr.splitlines()) == (code, said[: 1 + (code == 75)])
    assert len(notes()) == 2 * (code == 75)


# -------------------------------------------------------------------------------------------------------------- requeue
@pytest.mark.parametrize(
    ("given", "environment", "said", "asked"),
    [
        ({}, {}, "job 7 is queued again", ["squeue --noheader --jobs 7 --format %T", "scontrol requeue 7"]),
        ({"state": "COMPLETING"}, {}, "job 7 is completing, so it is not queued again", ["squeue"]),
        ({"state": ""}, {}, "job 7 is gone, so it is not queued again", ["squeue"]),
        ({"fails": True}, {}, "job 7 could not be queued again", ["squeue", "scontrol"]),
        ({}, {"SLURM_PROCID": "1"}, "", []),
        ({}, {"POLYHEAD_REQUEUE": "0"}, "", []),
        ({}, {"SUBMITIT_EXECUTOR": "slurm"}, "", []),
    ],
)
def test_which_job_asks_to_be_queued_again(slurm, monkeypatch, given, environment, said, asked):
    notes = slurm(**given)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert requeue() == said
    assert len(notes()) == len(asked)
    assert all(note.startswith(wanted) for note, wanted in zip(notes(), asked, strict=True))


def test_outside_slurm_nothing_is_asked(monkeypatch):
    assert requeue() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", "")
    assert requeue() == "job 7 could not be queued again"


def test_a_preempted_worker_saves_asks_and_resumes(tiny, tmp_path, whole, at_step, slurm, capsys):
    folder = tmp_path / "run"
    with claim(tiny(folder), folder):
        pass
    notes = slurm()
    at_step(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert main([str(folder), "--quiet"]) == 75
    said = f"polyhead: stopped and saved at step 8; resume with: polyhead resume {folder}"
    assert capsys.readouterr().err.splitlines() == [said, "polyhead: job 7 is queued again"]
    assert notes()[-1] == "scontrol requeue 7"
    assert read_metrics(folder)[-1]["step"] == 8
    assert main([str(folder), "--quiet"]) == 0
    same(folder, whole)


def test_the_command_line_has_the_same_codes(tiny, tmp_path, at_step, slurm, capsys):
    folder = tmp_path / "run"
    with claim(tiny(folder), folder):
        pass
    notes = slurm()
    for step, number, code in ((1, signal.SIGINT, 130), (3, signal.SIGUSR1, 75)):
        at_step(step, lambda number=number: os.kill(os.getpid(), number))
        assert cli.main(["resume", str(folder)]) == code
    assert capsys.readouterr().err.endswith("\npolyhead: job 7 is queued again\n")
    assert len(notes()) == 2


def test_a_signal_at_the_last_step_is_a_finished_run(tiny, tmp_path, at_step):
    at_step(11, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert run(tiny(tmp_path), progress=False).steps == 12
