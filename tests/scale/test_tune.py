"""Searches: the same settings give the same trials after any interruption; a failed trial does not end a search."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import forked
import pytest
from rich.console import Console
from searches import SPACE, Engine, facts, finish, install, score, search, tiny, worked

import polyhead as ph
from polyhead.scale.sweep.engines import local as engine_local
from polyhead.scale.tune import screen as tune_screen, search as tune
from polyhead.train.store.folder import read_config

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    return install(monkeypatch)


def test_a_study_is_a_function_of_its_question(tmp_path: pathlib.Path, engine: type[Engine]):
    whole = search(tmp_path / "whole", trials=12)
    assert [trial.number for trial in whole.trials] == list(range(12))
    assert {trial.state for trial in whole.trials} == {tune.DONE}
    assert len({trial.values["train.lr"] for trial in whole.trials}) == 12
    assert (whole.split, whole.metric) == ("validation", "r2")
    best = max(whole.trials, key=lambda trial: trial.score)
    assert whole.best == best
    assert set(whole.importance) == set(SPACE)
    for trial in whole.trials:
        run = read_config(trial.folder)
        assert (run.train.lr, run.transformer.layers, run.train.precision) == tuple(trial.values.values())
        assert trial.score == pytest.approx(score(run))
        assert trial.folder == tmp_path / "whole" / f"tiny-{ph.digest(run)}"
    assert engine.started == [trial.folder.name for trial in whole.trials]
    # In parts, it is the same; another seed is another.
    for trials in (1, 5, 12):
        parts = search(tmp_path / "parts", trials=trials)
    assert facts(parts) == facts(whole)
    other = search(tmp_path / "seed", dataclasses.replace(tiny(), seed=1), trials=3)
    assert [t.values for t in other.trials] != [t.values for t in whole.trials[:3]]


@pytest.mark.parametrize("where", ["worker", "proposal", "telling"])
def test_stopped_anywhere_it_goes_on(
    where: str, tmp_path: pathlib.Path, engine: type[Engine], monkeypatch: pytest.MonkeyPatch
):
    import optuna

    whole = search(tmp_path / "whole")
    engine.started.clear()
    count = 0

    def at_the_fourth(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return function(*given, **named)

    with monkeypatch.context() as patch:
        if where == "worker":
            patch.setattr(engine, "work", staticmethod(lambda run, folder: at_the_fourth(finish, run, folder)))
        elif where == "proposal":  # of its second field
            plain = optuna.trial.Trial.suggest_int
            patch.setattr(optuna.trial.Trial, "suggest_int", lambda *a, **named: at_the_fourth(plain, *a, **named))
        else:
            tell = tune._Study.tell
            patch.setattr(tune._Study, "tell", lambda *a: at_the_fourth(tell, *a))
        with pytest.raises(ph.train.Interrupted, match="stopped and saved; 3 of 8 trials are done, the same command"):
            search(tmp_path / "parts")
    left = tune.status(tmp_path / "parts")
    assert [trial.state for trial in left.trials] == [tune.DONE] * 3 + [tune.RUNNING]
    columns = {tuple(row) for row in tune_screen.rows(left, left.trials)}
    assert columns == {("trial", *SPACE, "validation r2", "")}  # also of an incomplete proposal
    assert facts(search(tmp_path / "parts")) == facts(whole)
    again = {"worker": 1, "proposal": 0, "telling": 0}[where]  # its result is there
    assert len(engine.started) == 8 + again
    assert len(set(engine.started)) == 8


def test_failures_are_trials(tmp_path: pathlib.Path, engine: type[Engine], monkeypatch: pytest.MonkeyPatch):
    def work(run: ph.Run, folder: pathlib.Path) -> int:
        if run.train.batch_size == 8:
            return -9
        if run.train.batch_size == 12:
            (folder / "worker.log").write_text("polyhead: train: the loss of tiny is nan at step 3\n")
            return 2
        return finish(run, folder)

    monkeypatch.setattr(engine, "work", staticmethod(work))
    run, sizes = tiny(accumulate=4), {"train.batch_size": "8,12,16,17"}
    found = search(tmp_path, run, space=sizes, trials=16, sampler="random")
    assert {trial.values["train.batch_size"]: (trial.state, trial.error) for trial in found.trials} == {
        8: (tune.FAILED, "killed by signal 9 (3 times)"),
        12: (tune.FAILED, "train: the loss of tiny is nan at step 3"),
        16: (tune.DONE, ""),
        17: (tune.FAILED, "train: Train: accumulate must divide batch_size 17 but is 4"),
    }
    assert {trial.score is None for trial in found.trials if trial.state == tune.FAILED} == {True}
    # The same settings twice are trained once; what failed is tried again.
    whole = [trial for trial in found.trials if trial.state == tune.DONE]
    assert len(whole) > 1
    assert engine.started.count(whole[0].folder.name) == 1
    assert {trial.folder for trial in found.trials if trial.values["train.batch_size"] == 17} == {None}
    # A killed worker says nothing of its settings, so only the others count as bad.
    import optuna

    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
    study = optuna.load_study(storage=optuna.storages.JournalStorage(backend), study_name=tune.NAME)
    states = {trial.params["train.batch_size"]: trial.state.name for trial in study.trials}
    assert states == {8: "FAIL", 12: "PRUNED", 16: "COMPLETE", 17: "PRUNED"}


def test_two_workers_and_one_run(tmp_path: pathlib.Path, engine: type[Engine], monkeypatch: pytest.MonkeyPatch):
    """Two trials at a time that are one run share its worker."""
    most = 0

    def work(run: ph.Run, folder: pathlib.Path) -> Iterator[int | None]:
        nonlocal most
        most = max(most, sum(handle.ended is None for handle in engine.handles))
        yield from worked(run, folder)

    monkeypatch.setattr(engine, "work", staticmethod(work))
    run = dataclasses.replace(tiny(), seed=8)  # proposes 1, 1, 2, 1, 2, 2
    found = search(tmp_path, run, space={"model.layers": "1,2"}, trials=6, workers=2, sampler="random")
    assert [trial.values["model.layers"] for trial in found.trials] == [1, 1, 2, 1, 2, 2]
    assert [trial.state for trial in found.trials] == [tune.DONE] * 6
    assert len(engine.started) == len(set(engine.started)) == 2
    assert most == 1


def test_lower_may_be_better(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "better", "lower")
    scores = [trial.score for trial in search(tmp_path, trials=16).trials]
    assert tune.status(tmp_path).best.score == min(scores)
    assert sum(scores[10:]) / 6 < sum(scores[:10]) / 10  # it looks where it is low


@pytest.mark.parametrize("prune", tune.PRUNERS)
def test_pruned_trials_stop_and_keep_what_they_have(
    prune: str, tmp_path: pathlib.Path, engine: type[Engine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine, "work", staticmethod(worked))
    found = search(tmp_path / "a", trials=12, prune=prune)
    pruned = [trial for trial in found.trials if trial.state == tune.PRUNED]
    assert 2 < len(pruned) < 12
    assert {trial.state for trial in found.trials} == {tune.PRUNED, tune.DONE}
    assert found.best.state == tune.DONE
    for trial in pruned:
        rows = ph.train.store.folder.read_metrics(trial.folder)
        assert trial.score in [row["r2"] for row in rows if row["split"] == "validation"]
        assert not (trial.folder / "result.json").exists()
    assert [handle.ended for handle in engine.handles].count(130) == len(pruned)
    for trials in (6, 9, 12):
        parts = search(tmp_path / "b", trials=trials, prune=prune)
    assert facts(parts) == facts(found)


def test_a_folder_holds_one_study(tmp_path: pathlib.Path):
    search(tmp_path, trials=1)
    for options, what in [
        ({"run": tiny(batch_size=8)}, "digest is"),
        ({"space": {"train.lr": "1e-4:1e-1"}}, "space is"),
        ({"sampler": "random"}, "sampler is tpe there and random here"),
        ({"prune": "median"}, "prune is None there and median here"),
    ]:
        with pytest.raises(ValueError, match=rf"tune: {tmp_path} holds another study \({what}"):
            search(tmp_path, **options)
    with (
        tune.locked(tmp_path),
        pytest.raises(ValueError, match=f"tune: another process works on the study in {tmp_path}"),
    ):
        search(tmp_path)
    (tmp_path / "study.json").unlink()
    with pytest.raises(ValueError, match=r"holds study.journal but no study.json"):
        search(tmp_path)
    with pytest.raises(ValueError, match=r"tune: \S+ holds no study"):
        tune.status(tmp_path)


def test_a_damaged_record(tmp_path: pathlib.Path, engine: type[Engine]):
    whole = search(tmp_path / "whole", trials=4)
    search(tmp_path / "parts", trials=2)
    journal = tmp_path / "parts" / "study.journal"
    before = journal.read_bytes()
    journal.write_bytes(before + b'{"op_code":4,"worker_')  # a line that a crash cut short
    assert len(tune.status(tmp_path / "parts").trials) == 2
    assert journal.read_bytes().startswith(before)
    assert len(journal.read_bytes()) > len(before)  # looking mends nothing
    assert facts(search(tmp_path / "parts", trials=4)) == facts(whole)
    for text in (b"no json\n{}\n", b'{"op_code":99}\n', b'[]\n{"op_code":4}\n', b'{"op_code":5,"trial_id":7}\n'):
        journal.write_bytes(text + before)
        with pytest.raises(ValueError, match=r"tune: \S+study.journal cannot be read \("):
            search(tmp_path / "parts")
    question = json.loads((tmp_path / "whole" / "study.json").read_text())
    strange = [[], {}, {"run": 3}, {"run": question["run"]}, {**question, "space": 3}]
    for values in strange:
        (tmp_path / "whole" / "study.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match=r"study\.json|holds no study"):
            tune.status(tmp_path / "whole")


def test_what_is_seen_on_a_terminal(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    console = functools.partial(Console, file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(tune_screen, "Console", lambda stderr: console())
    monkeypatch.setattr(tune_screen, "SECONDS", -1.0)
    monkeypatch.setattr(tune_screen, "ROWS", 3)
    found = search(tmp_path, trials=6, progress=True)
    said = screen.getvalue()
    last = re.sub(r"\x1b\[[0-9;]*m", "", said).rpartition("validation r2")[2].splitlines()
    best = [line for line in last if line.strip("│ ").endswith("best")]
    assert len(best) == 1
    assert f"{found.best.score:.4f}" in best[0]
    assert len([line for line in last if re.match(r"│ \d+ ", line)]) in (3, 4)


def test_the_record_is_plain_text(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    import optuna

    search(tmp_path, trials=2)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    assert len(search(tmp_path, trials=3).trials) == 3
    journal = optuna.storages.journal
    assert not hasattr(journal.JournalFileBackend, "load_snapshot")  # where Optuna would unpickle
    for line in (tmp_path / "study.journal").read_text().splitlines():
        json.loads(line)


def test_killed_in_the_middle(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """A real study of three trials, whose process is killed in the second."""
    monkeypatch.setattr(tune, "Local", engine_local.Local)
    monkeypatch.setattr(engine_local, "subprocess", forked.INSTEAD)
    code = (
        "import sys; import polyhead as ph; from polyhead.train import read_config\n"
        "ph.tune(read_config(sys.argv[1]), {'train.lr': '1e-4:1e-2:log'}, folder=sys.argv[2], trials=3, threads=1)"
    )
    ph.config.save(tiny(), tmp_path / "run.json")
    folder = tmp_path / "study"
    read, write = os.pipe()
    command = [sys.executable, "-c", code, str(tmp_path / "run.json"), str(folder)]
    with open(read) as said, open(write, "w") as told:
        process = forked.Process(command, stdout=told, stderr=told)
        assert any(line.startswith("trial 1: train.lr") for line in said)
        process.kill()
    assert process.wait() == -9
    before = tune.status(folder)
    assert [trial.state for trial in before.trials] == [tune.DONE, tune.RUNNING]
    after = tune.tune(tiny(), {"train.lr": "1e-4:1e-2:log"}, folder=folder, trials=3, threads=1, progress=False)
    assert [trial.state for trial in after.trials] == [tune.DONE] * 3
    assert [trial.values for trial in after.trials[:2]] == [trial.values for trial in before.trials]
    for trial in after.trials:
        result = ph.train.read_result(trial.folder)
        assert trial.score == result.scores["validation"]["r2"]
    assert len(list(folder.glob("tiny-*"))) == 3
