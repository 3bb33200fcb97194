"""A sweep on a real Slurm of one machine, which preempts a job.  Skipped if Slurm cannot be started."""

import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from many_runs import check_all, many_runs, process, working
from slurm import missing, slurm

from polyhead.scale.sweep.engines import Resources, slurm as engine_slurm
from polyhead.scale.sweep.engines.slurm import RECORD, Slurm
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.train import Interrupted

why = missing() or ("" if importlib.util.find_spec("submitit") else "submitit is not installed")
with_slurm = pytest.mark.skipif(bool(why), reason=why)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    with slurm(tmp_path / "slurm") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield


def job_of(place):
    return json.loads((place / RECORD).read_text())["job"]


@with_slurm
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore")
def test_jobs_are_preempted_requeued_and_killed_and_the_driver_leaves(tmp_path, monkeypatch):
    runs, folder = many_runs(), tmp_path / "sweep"
    hit: dict[str, pathlib.Path] = {}
    left: list[pathlib.Path] = []
    over = threading.Event()

    def wait():
        while not over.is_set():
            for place in working(folder):
                if place not in hit.values():
                    return place
            time.sleep(0.05)
        raise AssertionError("the sweep ended first")

    def disturb():
        hit["preempted"] = wait()  # as before the end of a job's time: all its processes are told
        subprocess.run(["scancel", "--signal=USR2", job_of(hit["preempted"])])  # it is told, and then gone already
        hit["requeued"] = wait()
        subprocess.run(["scontrol", "requeue", job_of(hit["requeued"])], check=True)
        hit["killed"] = wait()
        os.kill(process(hit["killed"]), signal.SIGKILL)
        hit["left"] = wait()
        over.set()

    plain = SweepScreen.update

    def update(screen):
        plain(screen)
        if "left" in hit and not left:
            left.append(hit["left"])
            raise KeyboardInterrupt

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(SweepScreen, "update", update)
            with pytest.raises(Interrupted, match=r"^left \d+ jobs in Slurm, running or queued \(scancel [\d ]+ ends"):
                sweep(runs, folder, engine=Slurm(pause=1.0))
    finally:
        over.set()
        thread.join()
    before = {place: job_of(place) for place in folder.glob("small-*")}
    outcomes = sweep(runs, folder, engine=Slurm(pause=1.0))
    check_all(runs, outcomes, folder, tmp_path / "plain")
    logs = {name: (place / "worker.log").read_text() for name, place in hit.items()}
    assert "stopped and saved at step" in logs["preempted"]
    assert "started again (1 of 2): killed by signal 9" in logs["killed"]
    again = [place for place in before if "started again" in (place / "worker.log").read_text()]
    assert again == [hit["killed"]]  # Slurm itself brought the others back
    assert {place: job_of(place) for place in before} == before  # no job was asked for twice


def test_what_slurm_needs(tmp_path, monkeypatch):
    run = many_runs()[:1]
    monkeypatch.setattr(shutil, "which", lambda name, **where: None)
    with pytest.raises(ValueError, match=r"^sweep: --slurm needs sbatch, which is not installed here: is this a login"):
        sweep(run, tmp_path, engine=Slurm())
    monkeypatch.setattr(shutil, "which", lambda name, **where: f"/usr/bin/{name}")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"^sweep: --slurm needs submitit: pip install 'polyhead\[slurm"):
        sweep(run, tmp_path, engine=Slurm())


@with_slurm
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore")
def test_what_sbatch_says_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^sweep: sbatch refused the jobs \(sbatch: error: [^\n]*partition[^\n]*\)$"):
        sweep(many_runs()[:2], tmp_path / "sweep", engine=Slurm(partition="nowhere"))


@pytest.mark.parametrize(
    ("states", "written", "code"),
    [
        (["PENDING", "RUNNING", "COMPLETED", "COMPLETED"], "0", 0),
        (["RUNNING", "COMPLETED", "PENDING", "RUNNING", "COMPLETED", "COMPLETED"], "2", 2),  # it was queued again
        (["RUNNING", "FAILED", None], "-9", -9),
        ([None, None], "1", 1),  # so long ago that Slurm has forgotten it
        (["NODE_FAIL", "NODE_FAIL"], None, 256),
        (["OUT_OF_MEMORY", "OUT_OF_MEMORY"], "-9", -9),
        (["CANCELLED", "CANCELLED"], "130", 130),  # by hand: it is not wanted any more
        (["PREEMPTED", "PREEMPTED"], "130", 75),  # by Slurm, without a new place in the queue: still wanted
    ],
)
def test_how_a_job_ended(tmp_path, monkeypatch, states, written, code):
    engine = Slurm(pause=0.0)
    engine.folder = tmp_path
    if written is not None:
        (tmp_path / "7_1.code").write_text(written + "\n")
    told = list(states)

    def squeue(words, **how):
        state = told.pop(0)
        said = "7_0 RUNNING\n" + (f"7_1 {state}\n" if state else "")
        return subprocess.CompletedProcess(words, 0, said)

    monkeypatch.setattr(engine_slurm.subprocess, "run", squeue)
    job = engine_slurm._Job(engine, "7_1")
    found = [job.code() for _ in states]
    assert found == [None] * (len(states) - 1) + [code]


def test_an_answer_of_squeue_counts_once(tmp_path):
    engine = Slurm(pause=1e9)
    engine.folder, engine.states, engine.asked = tmp_path, {"7_1": "FAILED"}, time.monotonic()
    job = engine_slurm._Job(engine, "7_1")
    found = []
    for looks in (0, 1, 1, 2):
        engine.looks = looks
        found.append(job.code())
    assert found == [None, None, None, engine_slurm.GONE]


def test_a_job_preempted_before_its_worker_has_started_signals_no_process(monkeypatch):
    """Process 0 would be every process of its group."""
    helpers = types.SimpleNamespace(DelayedSubmission=lambda *call: call)
    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(helpers=helpers))
    monkeypatch.setitem(sys.modules, "submitit.helpers", helpers)
    monkeypatch.setattr(signal, "signal", lambda *how: None)
    monkeypatch.setattr(os, "kill", lambda *whom: pytest.fail(f"kill{whom}"))
    task, folder = engine_slurm.Task(3).checkpoint("here")
    assert (task.threads, folder) == (3, "here")


@pytest.mark.parametrize(("state", "taken"), [("RUNNING", True), ("PENDING", True), ("FAILED", False), (None, False)])
def test_a_job_of_an_earlier_call_is_taken_over_while_slurm_knows_it(tmp_path, state, taken):
    engine = Slurm()
    engine.states = {} if state is None else {"7_1": state}
    assert engine._earlier(tmp_path) is None
    (tmp_path / RECORD).write_text(json.dumps({"job": "7_1"}))
    assert engine._earlier(tmp_path) == ("7_1" if taken else None)


def test_what_slurm_is_asked_for():
    """Without resources of its own, a sweep takes the defaults of the cluster."""
    resources = Resources(cpus=3, gpus=2.0, memory=4.5)
    asked = Slurm(resources, partition="here", account="us", minutes=2)._parameters(7)
    own = {"mem_gb": 4.5, "slurm_gpus_per_node": 2, "slurm_partition": "here", "slurm_account": "us"}
    given = {"slurm_array_parallelism": 7, "cpus_per_task": 3, "timeout_min": 2, "slurm_signal_delay_s": 60}
    assert asked == asked | given | own
    assert Slurm()._parameters(7).keys() == asked.keys() - own.keys()
