"""The queue of a sweep, with fake workers: a death affects one run, finished runs are kept, machines share the work."""

import json
import os
import signal
from collections import Counter

import pytest
from fake_workers import Fake, leave_result

import polyhead as ph
from polyhead.scale.sweep import Failure, screen
from polyhead.scale.sweep.engines import LOST, Resources
from polyhead.scale.sweep.job import Job
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.train import Interrupted, Result
from polyhead.train.stop import HELD
from polyhead.train.store.claims import claim


@pytest.fixture
def runs(tiny):
    return [tiny("unused", seed=seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("codes", "retries", "error"),
    [
        ([-9, 0], 2, None),
        ([-9, LOST, 0], 2, None),
        ([77, 77, 1, 0], 2, "it said 1 (3 times)"),
        ([-11, -11], 1, "killed by signal 11 (2 times)"),
        ([LOST], 0, "lost: its machine, or its job, is gone"),
        ([75, 75, -9, 75, 0], 1, None),  # preempted and saved: no death
        ([2], 2, "it said 2"),  # invalid input, or divergence: it would happen again
        ([130], 2, "it said 130"),  # stopped by hand
    ],
)
def test_a_worker_that_dies_is_started_again_up_to_a_limit(runs, tmp_path, codes, retries, error):
    engine = Fake({1: list(codes)})
    outcomes = sweep(runs, tmp_path, engine=engine, retries=retries, progress=False)
    assert [isinstance(outcome, Result) for outcome in outcomes] == [True, error is None, True]
    num_starts = len(codes) - len(engine.script[1])
    assert Counter(engine.started) == {0: 1, 1: num_starts, 2: 1}
    assert engine.started[:3] == [0, 1, 2]  # the others come first
    assert engine.is_closed
    if error is not None:
        assert outcomes[1] == Failure("tiny", tmp_path / f"tiny-{ph.digest(runs[1])}", codes[num_starts - 1], error)


@pytest.mark.parametrize("workers", [1, 3])
def test_at_most_so_many_workers_train_at_a_time(tiny, tmp_path, workers):
    engine = Fake({seed: [-9, 0] for seed in range(5)})
    runs = [tiny("unused", seed=seed) for seed in range(5)]
    outcomes = sweep(runs, tmp_path, engine=engine, workers=workers, progress=False)
    assert all(isinstance(outcome, Result) for outcome in outcomes)
    assert engine.max_working == workers


def test_finished_runs_are_not_trained_again(runs, tmp_path, capfd):
    results = sweep(runs, tmp_path, engine=Fake(), progress=False)
    engine = Fake()
    assert sweep(runs, tmp_path, engine=engine) == results
    assert not engine.started
    assert "seed=0: already done" in capfd.readouterr().err
    sweep(runs, tmp_path, engine=engine, again=True, progress=False)
    assert engine.started == [0, 1, 2]


def test_a_run_that_another_process_trains_is_left_to_it(runs, tmp_path, monkeypatch):
    """Run 0 gets its result there; run 1 is left without one; run 2 is claimed there just before our worker."""
    monkeypatch.setattr("polyhead.scale.sweep.jobs.HOLDER_SECONDS", 0.0)
    folders = [tmp_path / f"tiny-{ph.digest(run)}" for run in runs]
    claims = [claim(run, folder) for run, folder in zip(runs, folders, strict=True)]
    claims[0].__enter__()
    claims[1].__enter__()

    class OtherProcess(SweepScreen):
        def update(self):
            states = [job.state for job in self.jobs]
            if states == ["elsewhere"] * 3:
                leave_result(runs[0], folders[0])
                for held in claims:
                    held.__exit__(None, None, None)

    class Late(Fake):
        def start(self, folders_):
            if not self.started:
                claims[2].__enter__()
            return super().start(folders_)

    engine = Late({0: [], 1: [0], 2: [HELD, 0]})
    outcomes = sweep(runs, tmp_path, engine=engine, retries=0, screen=OtherProcess, progress=False)
    assert all(isinstance(outcome, Result) for outcome in outcomes)
    assert sorted(engine.started) == [1, 2, 2]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 130), ("SIGHUP", 130), ("SIGUSR1", 75)])
def test_a_signal_stops_the_workers_and_says_how_to_resume(runs, tmp_path, monkeypatch, name, code):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    class Signalled(SweepScreen):
        def tell(self, job, text):
            if job.run.seed == 1:
                if name == "SIGINT":  # in the background it is ignored
                    raise KeyboardInterrupt
                signal.raise_signal(getattr(signal, name))

    engine = Fake()
    with pytest.raises(Interrupted, match=r"^stopped 0; 1 of 3 runs are done, the same command resumes$") as stop:
        sweep(runs, tmp_path, engine=engine, progress=False, screen=Signalled)
    assert stop.value.code == code
    assert engine.is_closed


def test_nohup_is_heeded(runs, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        class HungUp(SweepScreen):
            def update(self):
                signal.raise_signal(signal.SIGHUP)

        outcomes = sweep(runs, tmp_path, engine=Fake(), progress=False, screen=HungUp)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert all(isinstance(outcome, Result) for outcome in outcomes)


def test_the_time_that_is_left(tiny, tmp_path):
    jobs = [Job(tiny("unused", seed=seed, steps=100), tmp_path / str(seed)) for seed in range(4)]
    assert screen.seconds_left(jobs, 2) is None
    jobs[0].outcome = Result("a", "", 100, 50.0, 1, {}, "", {})
    assert screen.seconds_left(jobs, 2) == pytest.approx(75)  # three runs of 50 s, two at a time
    jobs[1].step, jobs[1].steps_per_second = 50, 0.5  # 100 s; the others now take 100 x mean(0.5, 2)
    assert screen.seconds_left(jobs, 1) == pytest.approx(100 + 125 + 125)
    assert screen.seconds_left(jobs, 9) == pytest.approx(125)  # the longest run
    jobs[2].outcome = Failure("c", tmp_path, 2, "")
    assert screen.seconds_left(jobs, 1) == pytest.approx(225)


def test_without_a_terminal_a_line_at_intervals(runs, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(screen, "QUIET_SECONDS", -1.0)
    sweep(runs[:2], tmp_path, engine=Fake({0: [-9, 0], 1: [2]}))
    output = capfd.readouterr().err
    assert "all: 2 waiting\n" in output
    assert "seed=0: killed by signal 9; will be started again\n" in output
    assert "seed=1: failed: it said 2\n" in output
    assert output.endswith("all: 1 done, 1 failed\n")


def test_the_rows_of_a_run_that_resumed_from_an_earlier_step_are_read_again(tiny, tmp_path):
    job = Job(tiny(tmp_path), tmp_path)
    row = {"kind": "train", "loss": 0.5, "steps_per_second": 4.0}
    first, second = (json.dumps({**row, "step": step}) + "\n" for step in (1, 2))
    for text, step in ((first + second[:20], 1), (first + second, 2), (first, 1)):
        (tmp_path / "metrics.jsonl").write_text(text)
        job.poll()
        assert job.step == step


def test_damaged_rows_are_left_out(tiny, tmp_path):
    row = {"kind": "train", "step": 3, "loss": 0.5, "steps_per_second": 4.0}
    lines = [json.dumps(row), '{"step": "seven"}', '{"step": 1e999}', '{"kind": "train", "step": 3, "loss": null}', "3"]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "[" * 100_000]) + "\n")
    assert Job(tiny(tmp_path), tmp_path).scores == {"loss": "0.5000"}


def test_bad_arguments_are_one_line_and_leave_no_files(runs, tmp_path):
    with pytest.raises(ValueError, match="sweep: the run 'tiny' occurs twice"):
        sweep([runs[0], runs[0]], tmp_path)
    for name, minimum in (("workers", 1), ("threads", 1), ("retries", 0)):
        with pytest.raises(ValueError, match=f"sweep: {name} must be at least {minimum}"):
            sweep(runs, tmp_path, **{name: minimum - 1})
    for name, value in (("cpus", 0), ("gpus", -1.0), ("memory", 0.0)):
        with pytest.raises(ValueError, match=f"sweep: {name} must be at least"):
            Resources(**{name: value})
    assert not os.listdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"sweep: \S+file cannot be written \(File exists\)"):
        sweep(runs, tmp_path / "file")
    assert sweep([], tmp_path) == []


def test_a_folder_that_cannot_be_written_fails_alone(runs, tmp_path):
    log, file, _ = folders = [tmp_path / f"tiny-{ph.digest(run)}" for run in runs]
    (log / "worker.log").mkdir(parents=True)
    file.touch()
    outcomes = sweep(runs, tmp_path, engine=Fake(), progress=False)
    assert outcomes[0] == Failure("tiny", log, 1, f"{log}/worker.log: cannot be written (Is a directory)")
    assert outcomes[1] == Failure("tiny", file, 2, f"run folder: {file} cannot be made (File exists)")
    assert outcomes[2].folder == folders[2]


def test_a_folder_with_the_result_of_another_run_fails_alone(runs, tmp_path):
    sweep(runs[:1], tmp_path, engine=Fake(), progress=False)
    other = tmp_path / f"tiny-{ph.digest(runs[1])}"
    (tmp_path / f"tiny-{ph.digest(runs[0])}").rename(other)
    failure, result = sweep(runs[1:], tmp_path, engine=Fake(), progress=False)
    assert failure.error.startswith(f"run folder: {other} already holds another run")
    assert isinstance(result, Result)
