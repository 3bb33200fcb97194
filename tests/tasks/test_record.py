"""Files of data: a run begun with some does not resume with others (data.json), and where a relative folder lies."""

import json
from dataclasses import replace

import numpy as np
import pytest
from refusals import refusing

from polyhead import tasks


def maths(folder, changed):
    for part, count, shift in (("train-easy", 30, changed), ("interpolate", 10, 0)):
        (folder / part).mkdir(parents=True)
        questions = [f"What is {n}?\n{n + shift}\n" for n in range(count)]
        (folder / part / "numbers__gcd.txt").write_text("".join(questions))
    return tasks.Maths("numbers__gcd", "easy", data="original", folder=str(folder))


def games(folder, changed):
    folder.mkdir()
    images = np.zeros((40, 36, 36, 3), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(40) + changed
    np.savez(folder / "same_pentos.npz", images=images, labels=np.arange(40) % 2)
    return tasks.RelationalGames("same", examples=10, data="original", folder=str(folder))


def cifar(folder, changed):
    folder.mkdir()
    for i, name in enumerate((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")):
        records = np.full((20, 3073), i + (changed and i < 5), dtype=np.uint8)
        records.tofile(folder / f"{name}.bin")
    return tasks.Images("cifar10", folder=str(folder))


@pytest.mark.parametrize("make", [maths, games, cifar])
def test_a_run_on_files_does_not_resume_with_others(make, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    task, same, other = (make(tmp_path / name, changed) for name, changed in (("a", 0), ("b", 0), ("c", 1)))
    task.keep(run)
    record = json.loads((run / "data.json").read_bytes())
    same.keep(run)  # the folder may move
    before = (run / "data.json").read_bytes()
    assert json.loads(before)["fingerprint"] == record["fingerprint"]
    assert set(record) == {"data", "fingerprint"}
    with refusing(f"{type(task).__name__}: {run} was begun with other data of "):
        other.keep(run)
    assert (run / "data.json").read_bytes() == before
    (run / "data.json").write_text("{")
    with refusing("delete it if the data are the same as before"):
        task.keep(run)


@pytest.mark.parametrize("make", [maths, games, cifar])
def test_a_relative_folder_is_that_of_the_working_directory(make, tmp_path, monkeypatch):
    task, splits = replace(make(tmp_path / "a", 0), folder="."), ("train", "validation", "iid")
    monkeypatch.chdir(tmp_path / "a")
    for split in splits:
        task.batch(split, 4, seed=0, step=0)
    monkeypatch.chdir("/")
    for split in splits:
        with pytest.raises(ValueError, match=rf"^{type(task).__name__}: .*(cannot be read|does not exist)"):
            task.batch(split, 4, seed=0, step=0)
