"""Signals: the messages and exit codes of a run that is asked to stop."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from run_folders import same

import polyhead
from polyhead.train import run
from polyhead.train.__main__ import main
from polyhead.train.stop import StopSignals
from polyhead.train.store.folder import claim, read_metrics


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


@pytest.mark.parametrize("arguments", [("-m", "polyhead.train", "."), ("-m", "polyhead", "resume", ".")])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGUSR1", 75)])
def test_a_signal_while_libraries_are_imported_is_not_lost(arguments, name, code, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(SWALLOWS.format(name=name))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{pathlib.Path(polyhead.__file__).parents[1]}")
    process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)
    assert process.returncode == code
    assert process.stderr == "polyhead: stopped at once; what was saved before is kept\n"


def test_a_preempted_worker_saves_and_resumes(tiny, tmp_path, uninterrupted, at_step, capsys):
    folder = tmp_path / "run"
    with claim(tiny(folder), folder):
        pass
    at_step(7, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert main([str(folder), "--quiet"]) == 75
    expected = f"polyhead: stopped and saved at step 8; resume with: polyhead resume {folder}\n"
    assert capsys.readouterr().err == expected
    assert read_metrics(folder)[-1]["step"] == 8
    assert main([str(folder), "--quiet"]) == 0
    same(folder, uninterrupted)


def test_a_signal_at_the_last_step_is_a_finished_run(tiny, tmp_path, at_step):
    at_step(11, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert run(tiny(tmp_path), progress=False).steps == 12
