"""What a sweep's table says of every kind of run."""

import json
from dataclasses import replace

from polyhead import config, train
from polyhead.scale.sweep.engines import LOG
from polyhead.scale.sweep.status import status
from polyhead.train.store.claims import LOCK, claim
from polyhead.train.store.folder import METRICS


def place(run, folder):
    return folder / f"{run.name}-{config.digest(run)}"


def test_all_states(tiny, tmp_path):
    runs = [tiny(None, name="r", seed=seed) for seed in range(5)]
    done, running, broken, stopped, waiting = runs
    train.run(replace(done, folder=str(place(done, tmp_path))), progress=False)
    for run in (running, broken, stopped):
        place(run, tmp_path).mkdir()
        (place(run, tmp_path) / METRICS).write_text(json.dumps({"kind": "train", "step": 5, "loss": 0.1}) + "\n")
    (place(broken, tmp_path) / LOG).write_text("Traceback\npolyhead: train: the loss of r is nan at step 6\n")
    (place(stopped, tmp_path) / LOG).write_text(
        "polyhead: stopped and saved at step 5; go on with: polyhead resume x\n"
    )
    with claim(running, place(running, tmp_path)):
        rows = status(runs, tmp_path)
    assert [row["state"] for row in rows] == ["done", "running", "failed", "stopped", "waiting"]
    assert [row["step"] for row in rows] == ["12/12", "5/12", "5/12", "5/12", "0/12"]
    assert rows[0][""].startswith("compositional r2 ")
    assert rows[2][""] == "train: the loss of r is nan at step 6"
    assert status(runs, tmp_path)[1]["state"] == "stopped"  # nobody holds it now
    assert not place(waiting, tmp_path).exists()  # looking leaves no folder behind


def test_states_that_a_sweep_leaves(tiny, tmp_path):
    runs = [tiny(None, name="r", seed=seed) for seed in range(4)]
    elsewhere, retrying, late, _ = runs
    for run in runs:
        place(run, tmp_path).mkdir()
    (place(retrying, tmp_path) / LOG).write_text("step 5\npolyhead: started again (1 of 2): killed by signal 9\n")
    held = f"polyhead: run folder: another process is training in {place(late, tmp_path)}\n"
    (place(late, tmp_path) / LOG).write_text(held)
    with claim(elsewhere, place(elsewhere, tmp_path)):
        (place(elsewhere, tmp_path) / LOCK).write_text("node7 123\n")
        rows = status(runs, tmp_path)
    assert [row["state"] for row in rows] == ["elsewhere", "retrying", "stopped", "waiting"]
    assert [row[""] for row in rows] == ["on node7", "(1 of 2): killed by signal 9", "", ""]


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
    assert [row["kind"] for row in rows] == ["Softmax", "Hyla"]
    assert all(len(row) == len(rows[0]) for row in rows)
