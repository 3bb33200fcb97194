"""The queue of a sweep, with fake workers: a death affects one run, and finished runs are kept."""

import os
import signal

import pytest
from fake_workers import Fake
from refusals import refused

import polyhead as ph
from polyhead.scale.sweep import Failure, screen
from polyhead.scale.sweep.engines import NO_EXIT_CODE, Resources
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.train import Interrupted, Result
from polyhead.train.stop import HELD
from polyhead.train.store.folder import FAILURE, claim


@pytest.fixture
def runs(tiny):
    return [tiny("unused", seed=seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (-11, "killed by signal 11"),
        (NO_EXIT_CODE, "lost: its machine, or its job, is gone"),
        (HELD, "it said 73"),
        *((code, f"it said {code}") for code in (1, 2, 3, 75, 77, 130)),
    ],
)
def test_a_worker_that_ends_without_a_result_fails_alone(runs, tmp_path, code, error):
    engine = Fake({1: code})
    outcomes = sweep(dict(enumerate(runs)).values(), tmp_path, engine=engine, progress=False)
    assert [isinstance(outcome, Result) for outcome in outcomes] == [True, False, True]
    folder = tmp_path / f"tiny-{ph.digest(runs[1])}"
    assert outcomes[1] == Failure("seed=1", folder, code, error)
    assert engine.started == [0, 1, 2]
    assert engine.is_closed
    noted = code not in (2, 75, 130, HELD)  # after these the worker, or the other process, notes its end
    assert (folder / FAILURE).exists() == noted


@pytest.mark.parametrize("workers", [1, 3])
def test_at_most_so_many_workers_train_at_a_time(tiny, tmp_path, workers):
    engine = Fake({3: -9})
    runs = [tiny("unused", seed=seed) for seed in range(5)]
    outcomes = sweep(runs, tmp_path, engine=engine, workers=workers, progress=False)
    assert len(outcomes) == 5
    assert engine.max_working == workers


def test_finished_runs_are_not_trained_again(runs, tmp_path, capfd):
    results = sweep(runs, tmp_path, engine=Fake(), progress=False)
    engine = Fake()
    assert sweep(runs, tmp_path, engine=engine) == results
    assert not engine.started
    assert "seed=0: already done" in capfd.readouterr().err
    sweep(runs, tmp_path, engine=engine, again=True, progress=False)
    assert engine.started == [0, 1, 2]
    refused(lambda: sweep(runs, tmp_path, engine=Fake(refusal="sweep: no engine"), again=True), "no engine")
    assert sweep(runs, tmp_path, engine=Fake({0: 1, 1: 1, 2: 1}), progress=False) == results  # nothing was deleted


def test_a_run_that_another_process_trains_is_left_to_it(runs, tmp_path):
    folder = tmp_path / f"tiny-{ph.digest(runs[1])}"
    engine = Fake()
    with claim(runs[1], folder):
        outcomes = sweep(runs, tmp_path, engine=engine, progress=False)
    assert outcomes[1] == Failure("seed=1", folder, HELD, f"run folder: another process is training in {folder}")
    assert engine.started == [0, 2]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 130), ("SIGHUP", 130), ("SIGUSR1", 75)])
def test_a_signal_stops_the_workers_and_says_how_to_resume(runs, tmp_path, monkeypatch, name, code):
    def tell(self, job, text):
        if job.run.seed == 1:
            signal.raise_signal(getattr(signal, name))

    monkeypatch.setattr(SweepScreen, "tell", tell)
    engine = Fake()
    with pytest.raises(Interrupted, match=r"^stopped 0; 1 of 3 runs are done, the same command resumes$") as stop:
        sweep(runs, tmp_path, engine=engine, progress=False)
    assert stop.value.code == code
    assert engine.is_closed


def test_a_signal_before_again_has_deleted_anything_does_not_say_that_again_is_over(runs, tmp_path):
    engine = Fake()
    engine.open = lambda *arguments: signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"0 of 3 runs are done, the same command resumes$"):
        sweep(runs, tmp_path, engine=engine, again=True, progress=False)


def test_the_lines_of_a_sweep(runs, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(screen, "QUIET_SECONDS", -1.0)
    sweep(runs[:2], tmp_path, engine=Fake({1: 2}))
    output = capfd.readouterr().err
    assert "seed=0: starting\n" in output
    assert "seed=0: done in 0:06\n" in output
    assert "seed=1: failed: it said 2\n" in output
    assert output.endswith("all: 1 done, 1 failed\n")


def test_bad_arguments_are_one_line_and_leave_no_files(runs, tmp_path):
    with pytest.raises(ValueError, match="sweep: the run 'tiny' occurs twice"):
        sweep([runs[0], runs[0]], tmp_path)
    with pytest.raises(ValueError, match="sweep: workers must be at least 1"):
        sweep(runs, tmp_path, workers=0)
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
    assert outcomes[0] == Failure("seed=0", log, 1, f"{log}/worker.log: cannot be written (Is a directory)")
    assert outcomes[1] == Failure("seed=1", file, 2, f"run folder: {file}/config.json cannot be written (File exists)")
    assert outcomes[2].folder == folders[2]


def test_nohup_is_heeded(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(SweepScreen, "update", lambda screen: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcomes = sweep(runs, tmp_path, engine=Fake(), progress=False)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert all(isinstance(outcome, Result) for outcome in outcomes)
