"""The state that a sweep's table gives for every kind of run."""

import json
import os
import signal
from dataclasses import replace

from polyhead import config, train
from polyhead.scale.sweep.engines import LOG
from polyhead.scale.sweep.job import Job
from polyhead.scale.sweep.status import status
from polyhead.train.__main__ import main
from polyhead.train.stop import HELD, INTERRUPTED, MISTAKE
from polyhead.train.store.claims import LOCK, claim
from polyhead.train.store.folder import METRICS, Result, write_result
from polyhead.train.store.state import ENDED, State, write_end


def place(run, folder):
    return folder / f"{run.name}-{config.digest(run)}"


def test_all_states(tiny, tmp_path):
    runs = [tiny(None, name="r", seed=seed, evaluate=("compositional", "iid")) for seed in range(5)]
    done, running, broken, stopped, waiting = runs
    train.run(replace(done, folder=str(place(done, tmp_path))), progress=False)
    for run in (running, broken, stopped):
        place(run, tmp_path).mkdir()
        (place(run, tmp_path) / METRICS).write_text(json.dumps({"kind": "train", "step": 5, "loss": 0.1}) + "\n")
    write_end(place(broken, tmp_path), State.FAILED, "train: the loss of r is nan at step 6")
    write_end(place(stopped, tmp_path), State.STOPPED, "stopped and saved at step 5; resume with: polyhead resume x")
    with claim(running, place(running, tmp_path)):
        rows = status(runs, tmp_path)
    assert [row["state"] for row in rows] == ["done", "running", "failed", "stopped", "waiting"]
    assert [row["step"] for row in rows] == ["12/12", "5/12", "5/12", "5/12", "0/12"]
    assert rows[0][""].startswith("compositional r2 ")
    assert rows[2][""] == "train: the loss of r is nan at step 6"
    assert status(runs, tmp_path)[1]["state"] == "stopped"  # nobody holds it now
    assert not place(waiting, tmp_path).exists()  # looking leaves no folder behind


def test_states_that_a_sweep_leaves(tiny, tmp_path):
    runs = [tiny(None, name="r", seed=seed) for seed in range(5)]
    elsewhere, retrying, late, _, damaged = runs
    for run in runs:
        place(run, tmp_path).mkdir()
    write_end(place(retrying, tmp_path), State.RETRYING, "(1 of 2): killed by signal 9")
    (place(late, tmp_path) / LOG).write_text("polyhead: run folder: another process is training in it\n")
    (place(damaged, tmp_path) / ENDED).write_bytes(b"{")
    with claim(elsewhere, place(elsewhere, tmp_path)):
        (place(elsewhere, tmp_path) / LOCK).write_text("node7 123\n")
        rows = status(runs, tmp_path)
    assert [row["state"] for row in rows] == ["elsewhere", "retrying", "stopped", "waiting", "waiting"]
    assert [row[""] for row in rows] == ["on node7", "(1 of 2): killed by signal 9", "", "", ""]


def test_a_worker_notes_how_it_ended(tiny, tmp_path, at_step, capsys):
    """It failed, or was stopped; a worker that comes while another trains notes nothing; whoever trains forgets it."""
    runs = [tiny(None, name="bad", lr=1e38, warmup=0), tiny(None, name="r")]
    for run in runs:
        with claim(run, place(run, tmp_path)):
            pass
    at_step(7, lambda: os.kill(os.getpid(), signal.SIGINT))
    with claim(runs[1], place(runs[1], tmp_path)):
        assert main([str(place(runs[1], tmp_path))]) == HELD
    assert not (place(runs[1], tmp_path) / ENDED).exists()
    assert [main([str(place(run, tmp_path) / "config.json")]) for run in runs] == [MISTAKE, INTERRUPTED]
    failed, stopped = status(runs, tmp_path)
    assert (failed["state"], stopped["state"], stopped["step"], stopped[""]) == ("failed", "stopped", "8/12", "")
    assert failed[""].startswith("train: the loss of bad is nan at step 2; ")
    assert main([str(place(runs[1], tmp_path))]) == 0
    assert not (place(runs[1], tmp_path) / ENDED).exists()
    assert capsys.readouterr().err.count("polyhead: ") == 3


def test_the_fields_in_which_runs_differ_are_shown(tiny, tmp_path):
    runs = [tiny(None, name=f"r{i}", seed=i, lr=lr, dropout=0.1 * i) for i, lr in enumerate((1e-3, 3e-3))]
    rows = status(runs, tmp_path)
    assert [{k: v for k, v in row.items() if k in ("seed", "lr", "dropout")} for row in rows] == [
        {"seed": 0, "lr": 1e-3, "dropout": 0.0},
        {"seed": 1, "lr": 3e-3, "dropout": 0.1},
    ]
    assert set(rows[0]) == {"run", "seed", "lr", "dropout", "state", "step", ""}


def test_heads_of_another_kind_are_told_apart(tiny, tmp_path):
    from polyhead import Hyla, Softmax

    runs = [tiny(None, heads=(kind(2),)) for kind in (Softmax, Hyla)]
    rows = status(runs, tmp_path)
    assert [row["heads"] for row in rows] == ["softmax:2", "hyla:2"]
    assert all(len(row) == len(rows[0]) for row in rows)


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
        write_result(Result(run.name, config.digest(run), 12, 6.0, 1, {}, "", {}, tmp_path))
        then(job)
        assert job.text() == "loss 0.2500  iid r2 0.500  done in 0:06"
        for name in (METRICS, "result.json"):
            (tmp_path / name).unlink()
