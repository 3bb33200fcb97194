"""Parallel workers: a crash affects one run, which is restarted; finished runs are kept; machines share the work."""

import json
import os
import pathlib
import signal
import sys
from collections import Counter

import forked
import pytest
from fake_workers import Fake, leave

import polyhead as ph
from polyhead.scale.sweep import Failure, screen as live
from polyhead.scale.sweep.engines import GONE, Resources, local as engine_local, settings
from polyhead.scale.sweep.job import Job
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.train import Interrupted, Result
from polyhead.train.stop import HELD
from polyhead.train.store.claims import claim
from polyhead.train.store.folder import read_metrics

DIES_ONCE = """
import os, pathlib, signal, sys
import polyhead as ph
from polyhead.train.__main__ import main
draw, here = ph.tasks.FuzzyLogic.batch, pathlib.Path(sys.argv[1]) / "died"
def batch(task, split, size, **where):
    if split == "train" and where["step"] == 7 and "/tiny-" in sys.argv[1] and not here.exists():
        here.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(task, split, size, **where)
ph.tasks.FuzzyLogic.batch = batch
sys.exit(main([sys.argv[1]]))
"""


# --------------------------------------------------------------------------------------------------------- real workers
def test_results_failures_deaths_and_what_is_done(tiny, tmp_path, capfd, monkeypatch):
    good, bad = tiny("unused"), tiny("unused", name="bad", lr=1e38, warmup=0)
    alone = ph.train.run(tiny(tmp_path / "alone"), progress=False)
    monkeypatch.setattr(engine_local, "subprocess", forked.INSTEAD)
    monkeypatch.setattr(engine_local, "command", lambda folder: [sys.executable, "-c", DIES_ONCE, str(folder)])
    failed, done = sweep([bad, good], tmp_path, workers=2, threads=1)
    assert (failed.name, failed.code) == ("bad", 2)
    assert failed.error.startswith("train: the loss of bad is nan at step 2")
    assert done.folder == tmp_path / f"tiny-{ph.digest(good)}"
    assert done.environment["threads"] == 1
    assert (done.folder / "died").exists()
    assert done.scores == alone.scores  # it went on from the checkpoint of step 5
    assert [row["step"] for row in read_metrics(done.folder) if row["kind"] == "train"] == list(range(1, 13))
    said = capfd.readouterr().err
    assert f"tiny: started ({done.folder})" in said
    assert "tiny: killed by signal 9; will be started again" in said
    assert said.count("bad: started") == 1
    assert "bad: failed: train: the loss" in said
    assert "compositional r2" in said
    # Again: the finished run is not started.
    monkeypatch.setattr(engine_local, "subprocess", None)
    assert sweep([good], tmp_path) == [done]
    assert "tiny: already done" in capfd.readouterr().err
    with pytest.raises(AttributeError):  # now it would be
        sweep([good], tmp_path, again=True)


def test_ctrl_c_saves_every_worker(tiny, tmp_path, monkeypatch):
    run = tiny("unused", steps=1_000_000, save_every=1_000_000, eval_every=1_000_000)
    plain = SweepScreen.update
    jobs: list[Job] = []

    def update(screen):
        plain(screen)
        if not jobs and screen.jobs[0].step > 0:  # it has written its first row
            jobs[:] = screen.jobs
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SweepScreen, "update", update)
        patch.setattr(engine_local, "subprocess", forked.INSTEAD)
        with pytest.raises(KeyboardInterrupt) as stop:
            sweep([run], tmp_path, progress=False)
    assert isinstance(stop.value, Interrupted)
    assert str(stop.value) == "stopped and saved; 0 of 1 runs are done, the same command resumes"
    assert jobs[0].handle.code() == 130
    assert (jobs[0].folder / "checkpoint.safetensors").exists()
    said = (jobs[0].folder / "worker.log").read_text()
    assert "stopped and saved at step" in said
    assert "polyhead resume" in said


@pytest.mark.parametrize(
    ("runs", "workers", "threads", "wanted"),
    [(3, None, None, (3, 2)), (9, None, None, (8, 1)), (3, 2, None, (2, 4)), (3, 2, 5, (2, 5))],
)
def test_workers_share_the_cores(tiny, tmp_path, monkeypatch, runs, workers, threads, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    engine = engine_local.Local()
    assert (engine.open([tiny("unused")] * runs, tmp_path, workers, threads), engine.threads) == wanted
    for given, most in (("1", 1), ("3", 3), ("99", 99), ("", 99), ("2,2", 99)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        engine.open([tiny("unused")] * runs, tmp_path, workers, threads)
        assert engine.threads == (threads or min(most, wanted[1]))
    monkeypatch.setattr(engine_local, "_on_cpu", lambda runs: False)  # where each takes the whole device
    assert engine.open([tiny("unused")] * runs, tmp_path, None, None) == 1


# --------------------------------------------------------------------------------------------------------- fake workers
@pytest.mark.parametrize(
    ("codes", "retries", "error"),
    [
        ([-9, 0], 2, None),
        ([-9, GONE, 0], 2, None),
        ([77, 77, 1, 0], 2, "it said 1 (3 times)"),  # an exit code that is not ours; the disk
        ([-11, -11], 1, "killed by signal 11 (2 times)"),
        ([-9], 0, "killed by signal 9"),
        ([GONE], 0, "lost: its machine, or its job, is gone"),
        ([75, 75, -9, 75, 0], 1, None),  # preempted and saved: no death
        ([2], 2, "it said 2"),  # a mistake, or it diverged: it would again
        ([130], 2, "it said 130"),  # a user stopped it
    ],
)
def test_deaths_are_made_good_up_to_a_limit(tiny, tmp_path, codes, retries, error):
    runs = [tiny("unused", seed=seed) for seed in range(3)]
    engine = Fake({1: list(codes)})
    outcomes = sweep(runs, tmp_path, engine=engine, retries=retries, progress=False)
    assert [isinstance(outcome, Result) for outcome in outcomes] == [True, error is None, True]
    starts = len(codes) - len(engine.script[1])
    assert Counter(engine.started) == {0: 1, 1: starts, 2: 1}
    assert engine.started[:3] == [0, 1, 2]  # the others come first
    assert engine.closed
    assert engine.most == 1
    if error is not None:
        assert outcomes[1] == Failure("tiny", tmp_path / f"tiny-{ph.digest(runs[1])}", codes[starts - 1], error)


def test_as_many_work_as_are_asked_for(tiny, tmp_path):
    runs = [tiny("unused", seed=seed) for seed in range(5)]
    engine = Fake({seed: [-9, 0] for seed in range(5)})
    assert all(isinstance(one, Result) for one in sweep(runs, tmp_path, engine=engine, workers=3, progress=False))
    assert engine.most == 3
    assert Counter(engine.started) == dict.fromkeys(range(5), 2)


def test_a_run_that_another_process_holds_is_left_to_it(tiny, tmp_path, capfd, monkeypatch):
    """Run 0 gets its result there, run 1 is let go without one, run 2 is lost to it at the last moment."""
    monkeypatch.setattr("polyhead.scale.sweep.jobs.LOOK_SECONDS", 0.0)
    runs = [tiny("unused", seed=seed) for seed in range(3)]
    places = [tmp_path / f"tiny-{ph.digest(run)}" for run in runs]
    held = [claim(run, place) for run, place in zip(runs, places, strict=True)]
    held[0].__enter__()
    held[1].__enter__()
    engine = Fake({0: [], 1: [0], 2: [HELD, 0]})
    seen: list[list[str]] = []
    plain = SweepScreen.update

    def update(screen):
        plain(screen)
        states = [job.state for job in screen.jobs]
        if not seen or states != seen[-1]:
            seen.append(states)
        if states == ["elsewhere", "waiting", "running"]:
            held[2].__enter__()  # quicker than our worker, which now says that it is held
        if states == ["elsewhere"] * 3:
            assert screen.jobs[0].text().startswith("trained by another process on ")
            leave(runs[0], places[0])
            for one in held:
                one.__exit__(None, None, None)

    monkeypatch.setattr(SweepScreen, "update", update)
    outcomes = sweep(runs, tmp_path, engine=engine, retries=0)
    assert all(isinstance(outcome, Result) for outcome in outcomes)
    assert seen[0] == ["waiting"] * 3
    assert ["elsewhere"] * 3 in seen
    assert engine.started[0] == 2  # a sweep that meets another one takes runs from the end
    assert sorted(engine.started) == [1, 2, 2]
    assert "seed=1: let go by the other process" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 130), ("SIGHUP", 130), ("SIGUSR1", 75)])
def test_ctrl_c_says_what_the_engine_did(tiny, tmp_path, monkeypatch, name, code):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    engine = Fake({0: [0], 1: [0], 2: []})
    codes = iter([False, True])

    def poll(job):
        if job.config.seed == 1 and next(codes):
            if name == "SIGINT":  # in the background it is ignored
                raise KeyboardInterrupt
            signal.raise_signal(getattr(signal, name))
        return plain(job)

    plain = Job.poll
    monkeypatch.setattr(Job, "poll", poll)
    runs = [tiny("unused", seed=seed) for seed in range(3)]
    with pytest.raises(Interrupted, match=r"^stopped 1; 1 of 3 runs are done, the same command resumes$") as stop:
        sweep(runs, tmp_path, engine=engine, progress=False)
    assert stop.value.code == code
    assert engine.closed


def test_a_disk_that_is_gone_pauses_the_sweep(tiny, tmp_path, monkeypatch, capfd):
    run = tiny("unused")
    (tmp_path / "sweep").mkdir()
    rested: list[float] = []

    def rest(seconds):
        rested.append(seconds)
        (tmp_path / "gone").rename(tmp_path / "sweep")  # the share is back
        monkeypatch.setattr("polyhead.train.store.disk.sleep", lambda seconds: None)

    def opened(*_):
        (tmp_path / "sweep").rename(tmp_path / "gone")
        return 1

    engine = Fake()
    engine.open = opened  # type: ignore[method-assign]
    monkeypatch.setattr("polyhead.train.store.disk.sleep", rest)
    (done,) = sweep([run], tmp_path / "sweep", engine=engine, progress=False)
    assert isinstance(done, Result)
    assert len(rested) == 1
    assert "paused: No such file or directory" in capfd.readouterr().err


# --------------------------------------------------------------------------------------------------------- what is seen
def test_time_left(tiny, tmp_path):
    jobs = [Job(tiny("unused", seed=seed, steps=100), tmp_path / str(seed)) for seed in range(4)]
    assert live.left(jobs, 2) is None
    jobs[0].outcome = Result("a", "", 100, 50.0, 1, {}, "", {})
    assert live.left(jobs, 2) == pytest.approx(2 * 50)  # three runs, two at a time
    jobs[1].step, jobs[1].rate = 50, 0.5  # 100 s; the others now 100 x mean(0.5, 2)
    assert live.left(jobs, 3) == pytest.approx(125)
    assert live.left(jobs, 1) == pytest.approx(100 + 125 + 125)
    jobs[3].holder = "there"
    assert live.left(jobs, 1) == pytest.approx(225)
    jobs[2].outcome = Failure("c", tmp_path, 2, "")
    jobs[1].outcome = Failure("b", tmp_path, 2, "")
    assert live.left(jobs, 1) == pytest.approx(125)
    jobs[3].holder, jobs[0].overhead = None, 9.0  # starting a worker took so long
    assert live.left(jobs, 1) == pytest.approx(134)
    jobs[3].step, jobs[3].seconds, jobs[3].rate, jobs[3].training = 50, 200.0, 1.0, True  # with evaluations 4 s a step
    assert live.left(jobs, 1) == pytest.approx(200)


def test_without_a_terminal_a_line_now_and_then(tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(live, "QUIET_SECONDS", -1.0)
    sweep([tiny("unused", seed=seed) for seed in range(2)], tmp_path, engine=Fake({0: [-9, 0], 1: [2]}))
    said = capfd.readouterr().err
    assert "all: 1 running, 1 waiting\n" in said
    assert "all: 1 retrying, 1 running\n" in said or "all: 1 running, 1 retrying\n" in said
    assert "seed=1: failed: it said 2\n" in said
    assert said.endswith("all: 1 done, 1 failed\n")


def test_the_follower_reads_whole_rows_and_a_file_that_shrank(tiny, tmp_path):
    """It shrinks where a run is resumed from an earlier step."""
    worker = Job(tiny(tmp_path), tmp_path)
    row = {"kind": "train", "loss": 0.5, "steps_per_second": 4.0}
    one, two = (json.dumps({**row, "step": step}) + "\n" for step in (1, 2))
    for text, step in ((one + two[:20], 1), (one + two, 2), (one, 1)):
        (tmp_path / "metrics.jsonl").write_text(text)
        worker.poll()
        assert worker.step == step


def test_bad_sweeps(tiny, tmp_path):
    run = tiny("unused")
    with pytest.raises(ValueError, match="sweep: the run 'tiny' occurs twice"):
        sweep([run, run], tmp_path)
    for name, least in (("workers", 1), ("threads", 1), ("retries", 0)):
        with pytest.raises(ValueError, match=f"sweep: {name} must be at least {least} but is {least - 1}"):
            sweep([run], tmp_path, **{name: least - 1})
    for name, value, least in (("cpus", 0, 1), ("gpus", -1.0, 0), ("memory", 0.0, 0.001)):
        with pytest.raises(ValueError, match=f"sweep: {name} must be at least {least} but is {value}"):
            Resources(**{name: value})
    assert not os.listdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"sweep: \S+file cannot be written \(File exists\)"):
        sweep([run], tmp_path / "file")
    assert sweep([], tmp_path) == []


@pytest.mark.parametrize(("field", "value"), [("scores", None), ("scores", {"iid": 0.5}), ("environment", [])])
def test_a_result_of_another_shape_is_one_line(field, value, tmp_path):
    fields = {"name": "a", "digest": "0", "steps": 1, "seconds": 1.0, "parameters": 1, "command": ""}
    written = {**fields, "scores": {}, "environment": {}, field: value}
    (tmp_path / "result.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"result\.json: not a result \(scores and environment must be tables\)"):
        ph.train.read_result(tmp_path)


def test_the_environment_of_a_worker():
    given = {"OMP_NUM_THREADS": "9", "PYTHONPATH": "mine", "HOME": "there"}
    found = settings(3, given)
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"], found["HOME"]) == ("3", "3", "there")
    assert found["PYTHONPATH"] == f"{pathlib.Path(ph.__file__).parents[1]}{os.pathsep}mine"
    assert found["POLYHEAD_REQUEUE"] == "0"
