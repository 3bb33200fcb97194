"""Runs on the disk as a table: names, the best run, every format; and the verbs that print tables."""

import csv
import io
import json
import shutil
from dataclasses import replace

import pytest

import polyhead as ph
from polyhead.cli import main
from polyhead.config import digest, save
from polyhead.scale.records import of_sweep, records
from polyhead.scale.sweep.naming import labels
from polyhead.train import Result
from polyhead.train.store.folder import write_failure, write_result


def finished(run, folder, score):
    run_folder = folder / f"{run.name}-{digest(run)}"
    run_folder.mkdir(parents=True)
    save(run, run_folder / "config.json")
    scores = {split: {"loss": 0.5, "r2": score + at, "r2_se": 0.01} for at, split in enumerate(("iid", "novel"))}
    write_result(Result(run.name, digest(run), 12, 6.0, 1000 + run.seed, scores, "", {}, run_folder))
    return run_folder


@pytest.fixture
def grid(tiny, tmp_path):
    """Three finished runs of one name, and one that failed."""
    runs = [tiny(None, seed=seed, lr=lr) for seed in (0, 1) for lr in (1e-3, 0.1 + 0.2)]
    for run, score in zip(runs[:3], (0.25, 0.75, 0.5), strict=True):
        finished(run, tmp_path / "grid", score)
    failed = tmp_path / "grid" / f"tiny-{digest(runs[3])}"
    failed.mkdir()
    save(runs[3], failed / "config.json")
    write_failure(failed, "the loss is nan")
    return runs, tmp_path / "grid"


def test_runs_are_named_by_what_differs(tiny):
    runs = [tiny(None, seed=seed, lr=lr) for seed in (0, 1) for lr in (1e-3, 0.1 + 0.2)]
    assert labels(runs)[1] == "lr=0.30000000000000004 seed=0"
    assert labels([*runs, tiny(None, name="other")])[0] == "tiny lr=0.001 seed=0"
    assert labels([*runs, tiny(None, name="other")])[4] == "other"
    different = [tiny(None), tiny(None, seed=1, lr=0.5, dim=32, dropout=0.5, bias=False, batch_size=3)]
    assert labels(different) == [f"tiny-{digest(run)}" for run in different]
    assert labels([tiny(None), tiny(None, accumulate=2)]) == ["accumulate=1", "accumulate=2"]


def test_runs_are_named_by_their_heads(tiny):
    groups = [(ph.Softmax(4),), (ph.Softmax(2), ph.Hyla(2)), (ph.Softmax(2), ph.Hyla(2, act="identity"))]
    runs = [tiny(None, heads=heads, layers=2) for heads in (*groups, ((ph.Softmax(4),), (ph.Hyla(4),)))]
    expected = ["softmax:4", "softmax:2+hyla:2", "softmax:2+hyla:2 act=identity", "softmax:4/hyla:4"]
    assert labels(runs) == [f"heads={words}" for words in expected]
    assert labels([tiny(None, heads=(ph.Relational(4),)), runs[0]]) == ["heads=relational:4", "heads=softmax:4"]
    assert labels([tiny(None, heads=(ph.Hyla(4, value_depth=depth),)) for depth in (1, 2)])[0] == "value_depth=1"


def test_the_best_is_marked_and_all_formats_are_written(grid):
    runs, folder = grid
    table = of_sweep(runs, folder)
    label = "lr=0.30000000000000004 seed=0"
    assert {split: record.label for split, record in table.best().items()} == {"iid": label, "novel": label}
    assert [row["novel r2"] for row in table.cells()] == ["1.250 ± 0.010", "1.750 ± 0.010 *", "1.500 ± 0.010", ""]
    assert table.text("md").splitlines()[3].endswith("| done | 12/12 | 0.750 ± 0.010 * | 1.750 ± 0.010 * |")
    assert r"lr=0.001 seed=1 & done & 12/12 & 0.500 ± 0.010 & 1.500 ± 0.010 \\" in table.text("latex")
    finished(replace(runs[0], name="below"), folder, -0.25)
    finished(replace(runs[3], name="level"), folder, 0.75)
    best = [row["iid r2"] for row in records(folder).cells() if row["iid r2"].startswith("0.750")]
    assert best == ["0.750 ± 0.010 *"] * 2  # a run as good as the best is marked, too
    rows = list(csv.DictReader(io.StringIO(table.text("csv"))))
    assert [float(rows[1]["lr"]), rows[3]["iid r2"], rows[3]["state"]] == [0.1 + 0.2, "", "failed"]
    assert json.loads(table.text("json"))[2]["iid r2"] == 0.5
    assert table._repr_markdown_() == table.text("md")
    with pytest.raises(ValueError, match="records: unknown format 'tex'"):
        table.text("tex")


def test_runs_of_two_tasks_are_compared_each_by_its_own_metric(grid):
    runs, folder = grid
    task = ph.tasks.Sraven()
    other = ph.Run(task, ph.TransformerConfig(*task.ends), name="other")
    other_folder = folder / "other"
    other_folder.mkdir()
    save(other, other_folder / "config.json")
    scores = {"iid": {"loss": 0.5, "accuracy": 0.5, "accuracy_se": 0.01}}
    write_result(Result("other", digest(other), 12, 6.0, 1000, scores, "", {}, other_folder))
    first, second = records(f"{folder}/tiny-{digest(runs[0])}", other_folder).cells()
    assert first["iid r2"].startswith("0.250")
    assert second["iid accuracy"].startswith("0.500")
    assert first["iid accuracy"] == second["iid r2"] == ""


def test_a_run_and_its_copy_are_two_rows(grid):
    _, folder = grid
    first, copy = records(folder)[0].folder, folder.parent / "copy"
    table = records(folder, shutil.copytree(first, copy))
    assert {str(first), str(copy)} < {record.label for record in table}
    assert len(table) == 5


def test_a_damaged_configuration_hides_no_other_run(grid, capsys):
    runs, folder = grid
    path = folder / f"tiny-{digest(runs[0])}" / "config.json"
    path.write_text(path.read_text().replace('"steps"', '"stops"'))
    assert len(records(folder)) == 3
    assert capsys.readouterr().err.startswith("polyhead: left out: ")
    with pytest.raises(ValueError, match="unknown field"):
        records(path.parent)


def test_nan_is_neither_best_nor_json(tiny, tmp_path):
    for seed, score in enumerate((float("nan"), 0.5, 0.75)):
        finished(tiny(None, seed=seed), tmp_path, score)
    table = records(tmp_path)
    assert table.best()["iid"].label == "seed=2"
    assert [row["iid r2"][-1] for row in table.cells()] == ["0", "0", "*"]
    assert json.loads(table.text("json"), parse_constant=pytest.fail)[0]["iid r2"] is None


def test_scores_of_different_questions_have_no_best(tiny, tmp_path):
    for held_out in (0.25, 0.75):
        finished(tiny(None, task=ph.tasks.FuzzyLogic(length=8, held_out=held_out)), tmp_path, held_out)
    assert records(tmp_path).best() == {}
    for seed in (0, 1):
        finished(tiny(None, task=ph.tasks.FuzzyLogic(length=8, split_seed=seed)), tmp_path / "splits", float(seed))
    assert records(tmp_path / "splits").best()["iid"].run.task.split_seed == 1


def test_list_runs_prints_the_table_and_json(grid, capsys, monkeypatch):
    folder = grid[1]
    monkeypatch.chdir(folder.parent)
    assert main(["list", "runs", "grid"]) == 0
    printed = capsys.readouterr().out
    assert "the loss is nan" in printed
    assert "grid/tiny-" in printed
    assert "seed=1" in printed
    assert main(["list", "runs", "grid", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
