"""Real workers of every engine: processes of this machine, a real local Ray, submitit's own local executor."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import dies_once
import pytest

import polyhead as ph
from polyhead import config
from polyhead.scale.sweep.engines import Resources, start_process, worker_environment
from polyhead.scale.sweep.engines.here import Here
from polyhead.scale.sweep.engines.slurm import Slurm, WorkerTask
from polyhead.scale.sweep.jobs import sweep
from polyhead.train.store.folder import claim, read_metrics

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
SUPPORT = pathlib.Path(dies_once.__file__).parent


def sweep_apart(folder, engine, *runs, stop=False):
    """(outcomes or the line of an error, what was printed) of a sweep in a process of its own."""
    folder.mkdir()
    paths = []
    for run in runs:
        paths.append(str(folder / f"{run.name}.json"))
        config.save(run, paths[-1])
    search_path = os.pathsep.join([str(SUPPORT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": search_path, "STOP": "1" if stop else ""}
    process = subprocess.run(
        [sys.executable, str(SUPPORT / "engine_sweep.py"), str(folder / "runs"), engine, *paths],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


@pytest.mark.parametrize("engine", ["local", "ray", "slurm"])
def test_a_killed_worker_and_a_diverged_run_fail_alone_and_the_same_call_resumes(tiny, tmp_path, engine):
    task = dies_once.DiesOnce(length=8, marker=str(tmp_path / "died"))
    run = tiny("unused", task=task)
    diverging = tiny("unused", name="bad", lr=1e38, warmup=0)
    fine = tiny("unused", name="fine")
    (diverged, killed, result), output = sweep_apart(tmp_path / "sweep", engine, diverging, run, fine)
    assert (diverged["name"], diverged["code"]) == ("bad", 2)
    assert diverged["error"].startswith("train: the loss of bad is nan at step 2")
    assert (killed["name"], killed["code"], killed["error"]) == ("tiny", -9, "killed by signal 9")
    assert result["name"] == "fine"
    assert output.count(": started") == 3
    # Resumed from its last checkpoint, the killed run has each step once, with the numbers of an undisturbed run.
    (resumed,) = sweep([run], tmp_path / "sweep" / "runs", engine=Here(), progress=False)
    undisturbed = ph.train.run(dataclasses.replace(run, folder=str(tmp_path / "alone")), progress=False)
    assert resumed.scores == undisturbed.scores
    assert [row["step"] for row in read_metrics(resumed.folder) if row["kind"] == "train"] == list(range(1, 13))


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_ctrl_c_saves_every_worker(tiny, tmp_path, engine):
    run = tiny("unused", steps=1_000_000, save_every=1_000_000, eval_every=1_000_000)
    line, _ = sweep_apart(tmp_path / "sweep", engine, run, stop=True)
    assert line == "stopped and saved; 0 of 1 runs are done, the same command resumes"
    folder = tmp_path / "sweep" / "runs" / f"tiny-{ph.digest(run)}"
    assert (folder / "checkpoint.safetensors").exists()
    assert "stopped and saved at step" in (folder / "worker.log").read_text()


def test_a_signal_to_a_run_in_this_process_has_its_code(tiny, tmp_path, at_step):
    at_step(7, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    with pytest.raises(ph.train.Interrupted, match="stopped and saved; 0 of 2 runs are done") as stop:
        sweep([tiny("unused"), tiny("unused", name="other")], tmp_path, engine=Here(), progress=False)
    assert stop.value.code == 75


def test_resources_that_no_machine_of_ray_has_are_refused(tiny, tmp_path):
    line, _ = sweep_apart(tmp_path / "sweep", "ray-gpus-64", tiny("unused"))
    assert re.fullmatch(r"sweep: a run needs 64 GPU; the largest machine of Ray has \d+", line)


def test_slurm_needs_a_login_node(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^sweep: --slurm needs a login node of Slurm"):
        sweep([tiny("unused")], tmp_path, engine=Slurm())


def test_the_parameters_of_a_slurm_job():
    parameters = Slurm(Resources(cpus=3, gpus=2.0), partition="here", account="us", minutes=2).parameters
    expected = {"timeout_min": 2, "cpus_per_task": 3, "slurm_gpus_per_node": 2, "slurm_account": "us"}
    assert expected.items() <= parameters.items()
    assert parameters["mem_gb"] is None  # the cluster's


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


def test_a_worker_imports_nothing_from_the_current_folder(tiny, tmp_path):
    """A file random.py of the user is not Python's module random."""
    (tmp_path / "random.py").write_text("raise SystemExit('imported by mistake')")
    run = tiny("unused", steps=1)
    with claim(run, tmp_path / "run"):
        pass
    worker = start_process(tmp_path / "run", worker_environment(1, os.environ), cwd=tmp_path)
    assert worker.wait() == 0, (tmp_path / "run" / "worker.log").read_text()
