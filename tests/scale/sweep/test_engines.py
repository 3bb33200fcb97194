"""Real workers of every engine: processes of this machine, a real local Ray, submitit's own local executor."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import dies_once
import engine_sweep
import pytest

import polyhead as ph
from polyhead import config
from polyhead.scale.sweep.engines.here import Here
from polyhead.scale.sweep.engines.local import Local
from polyhead.scale.sweep.engines.slurm import Slurm, WorkerTask
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.train.store.folder import read_metrics

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
SUPPORT = pathlib.Path(dies_once.__file__).parent
STOPPED = "stopped and saved; 0 of 1 runs are done, the same command resumes"


@pytest.fixture(autouse=True)
def _workers_find_the_task(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), *sys.path]))
    monkeypatch.setattr(Slurm, "poll_seconds", 0.1)  # a cluster is asked less often


@pytest.fixture
def dying(tiny, tmp_path):
    """A run whose worker is killed at step 7, once."""
    return tiny("unused", task=dies_once.DiesOnce(length=8, marker=str(tmp_path / "died")))


@pytest.fixture
def long(tiny):
    return tiny("unused", name="long", steps=1_000_000, save_every=1_000_000, eval_every=1_000_000)


def check_resumed(run, tmp_path):
    """From its last checkpoint the killed run has each step once, with the numbers of an undisturbed run."""
    (resumed,) = sweep([run], tmp_path / "runs", engine=Here(), progress=False)
    undisturbed = ph.train.run(dataclasses.replace(run, folder=str(tmp_path / "alone")), progress=False)
    assert resumed.scores == undisturbed.scores
    assert [row["step"] for row in read_metrics(resumed.folder) if row["kind"] == "train"] == list(range(1, 13))


def check_stopped(run, tmp_path):
    folder = tmp_path / "runs" / f"{run.name}-{ph.digest(run)}"
    assert (folder / "checkpoint.safetensors").exists()
    assert "stopped and saved at step" in (folder / "worker.log").read_text()


@pytest.mark.parametrize("engine", [Local, functools.partial(Slurm, cluster="local")], ids=["local", "slurm"])
def test_a_killed_worker_and_a_diverged_run_fail_alone_and_the_same_call_resumes(tiny, dying, tmp_path, capfd, engine):
    diverging = tiny("unused", name="bad", lr=1e38, warmup=0)
    fine = tiny("unused", name="fine")
    diverged, killed, result = sweep([diverging, dying, fine], tmp_path / "runs", workers=2, engine=engine())
    assert (diverged.name, diverged.code) == ("bad", 2)
    assert diverged.error.startswith("train: the loss of bad is nan at step 2")
    assert (killed.name, killed.code, killed.error) == ("tiny", -9, "killed by signal 9")
    assert result.name == "fine"
    assert capfd.readouterr().err.count(": started") == 3
    check_resumed(dying, tmp_path)


def test_ctrl_c_saves_every_worker(long, tmp_path, monkeypatch):
    """A worker imports nothing from the current folder: a file random.py of the user is not Python's module."""
    (tmp_path / "random.py").write_text("raise SystemExit('imported by mistake')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SweepScreen, "update", engine_sweep.stop_at_first_row)
    with pytest.raises(ph.train.Interrupted, match=f"^{STOPPED}$"):
        sweep([long], tmp_path / "runs", workers=2)
    check_stopped(long, tmp_path)


def test_ray_loses_only_what_died_and_saves_after_ctrl_c(tiny, dying, long, tmp_path):
    """One cluster loses a worker and a diverged run alone, saves after Ctrl-C, and refuses what no machine has."""
    paths = []
    for run in (tiny("unused", name="bad", lr=1e38, warmup=0), dying, tiny("unused", name="fine"), long):
        paths.append(str(tmp_path / f"{run.name}.json"))
        config.save(run, paths[-1])
    command = [sys.executable, engine_sweep.__file__, str(tmp_path / "runs"), *paths]
    environment = {**os.environ, "RAY_worker_niceness": "0"}  # else other tests, not so nice, leave its workers no core
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    (diverged, killed, result), stopped, refused = json.loads(process.stdout.splitlines()[-1])
    assert re.fullmatch(r"sweep: a run needs 64 GPU; the largest machine of Ray has \d+", refused)
    assert (diverged["name"], diverged["code"]) == ("bad", 2)
    assert diverged["error"].startswith("train: the loss of bad is nan at step 2")
    assert (killed["name"], killed["code"], killed["error"]) == ("tiny", -9, "killed by signal 9")
    assert result["name"] == "fine"
    assert stopped == STOPPED
    assert process.stderr.count(": started") == 4
    check_resumed(dying, tmp_path)
    check_stopped(long, tmp_path)


def test_a_signal_to_a_run_in_this_process_has_its_code(tiny, tmp_path, at_step):
    at_step(7, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    with pytest.raises(ph.train.Interrupted, match="stopped and saved; 0 of 2 runs are done") as stop:
        sweep([tiny("unused"), tiny("unused", name="other")], tmp_path, engine=Here(), progress=False)
    assert stop.value.code == 75


def test_slurm_needs_a_login_node(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^sweep: --slurm needs a login node of Slurm"):
        sweep([tiny("unused")], tmp_path, engine=Slurm())


def test_a_preempted_job_lets_its_worker_save_and_is_queued_again(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    saved = str(tmp_path / "saved")
    saves = f"import pathlib; signal.sigwait([signal.SIGUSR1]); pathlib.Path({saved!r}).touch()"
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); print(flush=True); "
    worker = subprocess.Popen([sys.executable, "-c", block + saves], stdout=subprocess.PIPE)
    worker.stdout.readline()
    task = WorkerTask(3)
    task.workers.append(worker.pid)
    submission = task.checkpoint("folder")
    worker.stdout.close()
    worker.returncode = 0
    assert (tmp_path / "saved").exists()
    assert (submission.function.threads, submission.args) == (3, ("folder",))
