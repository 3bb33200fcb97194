"""The state that a sweep's table gives for every kind of run."""

import json
import os
import signal
from dataclasses import replace

from polyhead import train
from polyhead.scale.records import of_sweep
from polyhead.train.__main__ import main
from polyhead.train.stop import HELD, INTERRUPTED, MISTAKE
from polyhead.train.store.folder import FAILURE, METRICS, claim, folder_in_sweep, write_failure


def test_a_table_has_the_state_of_every_kind_of_run(tiny, tmp_path):
    runs = [tiny(None, name="r", seed=seed) for seed in range(7)]
    folders = [folder_in_sweep(run, tmp_path) for run in runs]
    finished, running, broken, stopped, waiting, elsewhere, empty = folders
    train.run(replace(runs[0], folder=str(finished)), progress=False)
    for folder in (running, broken, stopped, elsewhere, empty):
        folder.mkdir()
    for folder in (running, broken, stopped):
        (folder / METRICS).write_text(json.dumps({"kind": "train", "step": 5, "loss": 0.1}) + "\n")
    failure = "train: the loss of r is nan at step 6"
    write_failure(broken, failure)
    with claim(runs[1], running), claim(runs[5], elsewhere):
        records = of_sweep(runs, tmp_path)
    states = ["done", "running", "failed", "stopped", "waiting", "running", "waiting"]
    assert [record.state for record in records] == states
    assert [record.step for record in records] == [12, 5, 5, 5, 0, 0, 0]
    assert [record.detail for record in records] == ["", "", failure, "", "", "", ""]
    assert of_sweep(runs, tmp_path)[1].state == "stopped"  # its claim has ended
    assert not waiting.exists()  # looking leaves no folder behind


def test_a_worker_notes_how_it_ended(tiny, tmp_path, at_step, capsys):
    """It failed, or was stopped.  While another one trains, a worker notes nothing; a new start deletes the note."""
    runs = [tiny(None, name="bad", lr=1e38, warmup=0), tiny(None, name="r")]
    for run in runs:
        with claim(run, folder_in_sweep(run, tmp_path)):
            pass
    at_step(7, lambda: os.kill(os.getpid(), signal.SIGINT))
    with claim(runs[1], folder_in_sweep(runs[1], tmp_path)):
        assert main([str(folder_in_sweep(runs[1], tmp_path))]) == HELD
    assert not (folder_in_sweep(runs[1], tmp_path) / FAILURE).exists()
    assert [main([str(folder_in_sweep(run, tmp_path) / "config.json")]) for run in runs] == [MISTAKE, INTERRUPTED]
    failed, stopped = of_sweep(runs, tmp_path)
    assert (failed.state, stopped.state, stopped.step, stopped.detail) == ("failed", "stopped", 8, "")
    assert failed.detail.startswith("train: the loss of bad is nan at step 2; ")
    assert main([str(folder_in_sweep(runs[1], tmp_path))]) == 0
    assert not (folder_in_sweep(runs[1], tmp_path) / FAILURE).exists()
    assert main([str(tmp_path)]) == MISTAKE
    assert not (tmp_path / FAILURE).exists()  # a folder without config.json is no run
    assert capsys.readouterr().err.count("polyhead: ") == 4
