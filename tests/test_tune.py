"""Searches: the same question gives the same trials, whatever happens in between; a failed trial is only a trial."""

import dataclasses
import json
import math
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import polyhead as ph
from polyhead import cli, tune
from polyhead.train import engine_local
from polyhead.train.folder import Metrics, Result, read_config, write_result
from polyhead.tune_space import Choice, Range, changed, is_space, kinds_of, read_space

pytest.importorskip("optuna")
SPACE = {"train.lr": "1e-4:1e-1:log", "model.layers": "1:4", "train.precision": "fp32,bf16"}


def tiny(**changes: Any) -> ph.Run:
    """A run that trains in a moment."""
    task = ph.tasks.FuzzyLogic(length=8)
    model = ph.TransformerConfig(*task.ends, dim=16, layers=1, heads=(ph.Softmax(2),), max_length=8)
    train = ph.Train(steps=20, batch_size=4, eval_every=5, evaluate=("iid", "validation"), eval_batches=1)
    return ph.Run(task=task, model=model, name="tiny", train=dataclasses.replace(train, **changes), device="cpu")


def score(run: ph.Run) -> float:
    """What the fake worker finds: best at a rate of 1e-2."""
    return 1 - (math.log10(run.train.lr) + 2) ** 2 - 0.1 * run.transformer.layers


def finish(run: ph.Run, folder: pathlib.Path) -> int:
    """A worker's work: rows and a result."""
    rows, train = Metrics(folder, lambda row: True), run.train
    for step in range(train.eval_every, train.steps + 1, train.eval_every):
        found = score(run) * step / train.steps
        rows.add({"kind": "eval", "step": step, "split": "iid", "loss": 0.0, "r2": 7.0})
        rows.add({"kind": "eval", "step": step, "split": "validation", "loss": 0.0, "r2": found})
    rows.close()
    scores = {"iid": {"r2": 7.0}, "validation": {"r2": score(run)}}
    write_result(Result(run.name, ph.digest(run), train.steps, 0.1, 1, scores, "", {}, folder))
    return 0


class Engine:
    """Workers that have ended when they are started.  `work`: what they do, to their exit code."""

    pause, queues = 0.0, False
    work: Callable[[ph.Run, pathlib.Path], int | None] = staticmethod(finish)
    started: list[str]

    def open(self, runs: Any, folder: Any, workers: int, threads: Any) -> int:
        return workers

    def start(self, folders: Sequence[pathlib.Path]) -> list[Any]:
        Engine.started += [folder.name for folder in folders]
        return [Handle(Engine.work(read_config(folder), folder)) for folder in folders]

    def stop(self, handles: Any) -> str:
        return "stopped and saved"

    def close(self) -> None:
        pass


class Handle:
    """With a `process` to terminate, as a worker of this machine has it."""

    def __init__(self, ended: int | None) -> None:
        self.ended, self.process = ended, self

    def code(self) -> int | None:
        return self.ended

    def terminate(self) -> None:
        self.ended = 130


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    monkeypatch.setattr(Engine, "started", [], raising=False)
    monkeypatch.setattr(Engine, "work", staticmethod(finish))
    monkeypatch.setattr(tune, "Local", Engine)
    return Engine


def search(folder: pathlib.Path, run: ph.Run | None = None, **options: Any) -> tune.Outcome:
    asked = {"trials": 8, "progress": False, **options}
    space = asked.pop("space", SPACE)
    return tune.tune(run or tiny(), space, folder=folder, **asked)


def facts(outcome: tune.Outcome) -> list[Any]:
    return [(t.number, t.state, t.values, t.score, t.folder and t.folder.name) for t in outcome.trials]


def test_a_study_is_a_function_of_its_question(tmp_path: pathlib.Path, engine: type[Engine]):
    whole = search(tmp_path / "whole", trials=14)
    assert [trial.number for trial in whole.trials] == list(range(14))
    assert {trial.state for trial in whole.trials} == {tune.DONE}
    assert len({trial.values["train.lr"] for trial in whole.trials}) == 14
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
    # In parts, it is the same; another seed or sampler is another.
    for trials in (1, 5, 14):
        parts = search(tmp_path / "parts", trials=trials)
    assert facts(parts) == facts(whole)
    other = search(tmp_path / "seed", dataclasses.replace(tiny(), seed=1), trials=3)
    assert [t.values for t in other.trials] != [t.values for t in whole.trials[:3]]
    # What is learned counts: trials after the first ten are closer to the best.
    assert facts(search(tmp_path / "random", trials=14, sampler="random"))[10:] != facts(whole)[10:]


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
    working: list[Handle] = []

    def start(self: Engine, folders: Sequence[pathlib.Path]) -> list[Handle]:
        nonlocal most
        engine.started += [folder.name for folder in folders]
        handle = Handle(None)
        working.append(handle)
        most = max(most, sum(one.ended is None for one in working))
        polls = iter(range(3))

        def code() -> int | None:
            if next(polls, None) is None and handle.ended is None:
                handle.ended = finish(read_config(folders[0]), folders[0])
            return handle.ended

        handle.code = code  # type: ignore[method-assign]
        return [handle]

    monkeypatch.setattr(engine, "start", start)
    found = search(tmp_path, space={"model.layers": "1,2"}, trials=6, workers=2, sampler="random")
    assert [trial.state for trial in found.trials] == [tune.DONE] * 6
    assert len(engine.started) == len(set(engine.started)) == 2
    assert most == 2


def test_lower_may_be_better(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "better", "lower")
    scores = [trial.score for trial in search(tmp_path, trials=16).trials]
    assert tune.status(tmp_path).best.score == min(scores)
    assert sum(scores[10:]) / 6 < sum(scores[:10]) / 10  # it looks where it is low


@pytest.mark.parametrize("prune", tune.PRUNERS)
def test_pruned_trials_stop_and_keep_what_they_have(
    prune: str, tmp_path: pathlib.Path, engine: type[Engine], monkeypatch: pytest.MonkeyPatch
):
    handles: list[Handle] = []

    def start(self: Engine, folders: Sequence[pathlib.Path]) -> list[Handle]:
        """Rows come one by one; the worker ends after the last, or when it is asked to."""
        engine.started += [folder.name for folder in folders]
        run, handle, folder = read_config(folders[0]), Handle(None), folders[0]
        rows = Metrics(folder, lambda row: True)
        steps = iter(range(run.train.eval_every, run.train.steps + 1, run.train.eval_every))

        def code() -> int | None:
            if handle.ended is None and (step := next(steps, None)) is not None:
                found = score(run) * step / run.train.steps
                rows.add({"kind": "eval", "step": step, "split": "iid", "loss": 0.0, "r2": 7.0})
                rows.add({"kind": "eval", "step": step, "split": "validation", "loss": 0.0, "r2": found})
            elif handle.ended is None:
                handle.ended = finish(run, folder)
            if handle.ended is not None:
                rows.close()
            return handle.ended

        handle.code = code  # type: ignore[method-assign]
        handles.append(handle)
        return [handle]

    monkeypatch.setattr(engine, "start", start)
    found = search(tmp_path / "a", trials=14, prune=prune)
    pruned = [trial for trial in found.trials if trial.state == tune.PRUNED]
    assert 2 < len(pruned) < 14
    assert {trial.state for trial in found.trials} == {tune.PRUNED, tune.DONE}
    assert found.best.state == tune.DONE
    for trial in pruned:
        rows = ph.train.folder.read_metrics(trial.folder)
        assert trial.score in [row["r2"] for row in rows if row["split"] == "validation"]
        assert not (trial.folder / "result.json").exists()
    assert [handle.ended for handle in handles].count(130) == len(pruned)
    monkeypatch.setattr(engine, "start", start)
    for trials in (6, 9, 14):
        parts = search(tmp_path / "b", trials=trials, prune=prune)
    assert facts(parts) == facts(found)


BAD = [
    ({"train.lr": "1e-2:1e-4"}, "train.lr: the lower end of a range comes first, and below the other, but '1e-2:1e-4'"),
    ({"train.lr": "0.1:0.1"}, "train.lr: the lower end of a range comes first"),
    ({"train.weight_decay": "0:0.3:log"}, "train.weight_decay: a logarithmic range begins above 0 but '0:0.3:log'"),
    ({"train.lr": "a:b"}, "train.lr must be a number but 'a' came"),
    ({"train.lr": "1e-4:inf"}, "train.lr: a range has ends but '1e-4:inf' came"),
    ({"train.lr": "1:2:3"}, "train.lr: '1:2:3' is no range LOW:HIGH or LOW:HIGH:log and no list A,B,C"),
    ({"train.lr": "1e-3"}, "train.lr: '1e-3' is no range"),
    ({"train.precision": "bf16:fp32"}, "train.precision: 'bf16:fp32' is no range"),
    (
        {"train.precision": "fp32,bf61"},
        "train.precision=bf61: train: Train: unknown precision 'bf61'; did you mean 'bf16'",
    ),
    ({"model.dim": "64,64"}, "model.dim: '64,64' names a value twice"),
    ({"model.dim": "1.5:3"}, "model.dim must be an integer but '1.5' came"),
    ({"train.batch_size": "-4,-2"}, "train.batch_size=-2: train: Train: batch_size must be"),
    ({"train.lrr": "1:2"}, "unknown field 'train.lrr'; did you mean 'train.lr'"),
    ({"train.betas": "0.1,0.9"}, "train.betas is no number, string or truth value"),
    ({"train.log_every": "1:9"}, "train.log_every cannot change a result, so there is nothing to choose"),
    ({"task.variables": "2,3"}, "task.variables is part of the question"),
    ({"seed": "0,1,2"}, "seed is no setting"),
    ({}, "nothing to choose: give a field a range"),
]


@pytest.mark.parametrize(("space", "said"), BAD)
def test_bad_ranges_are_one_line(space: dict[str, str], said: str, tmp_path: pathlib.Path):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (below)
        search(tmp_path / "none", space=space)
    assert str(error.value).startswith(f"tune: {said}")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "none").exists()


def test_spaces():
    run = tiny()
    given = {"train.lr": "1e-4:1:log", "model.layers": "1:3", "train.clip": "0.5,None", "model.causal": "true,False"}
    assert read_space(run, given) == {
        "train.lr": Range(1e-4, 1.0, True),
        "model.layers": Range(1, 3),
        "train.clip": Choice((0.5, None)),
        "model.causal": Choice((True, False)),
    }
    assert changed(run, {"train.clip": None, "model.heads.0.heads": 4}).transformer.heads == (ph.Softmax(4),)
    assert is_space("0:1", kinds_of(run, "train.lr"))
    assert not is_space("cuda:1", kinds_of(run, "device"))


def test_bad_options(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    for options, said in [
        ({"sampler": "tpee"}, "tune: unknown sampler 'tpee'; did you mean 'tpe'"),
        ({"prune": "mean"}, "tune: unknown pruner 'mean'; did you mean 'median'"),
        ({"trials": 0}, "tune: trials must be at least 1 but is 0"),
        ({"workers": 0}, "tune: workers must be at least 1 but is 0"),
    ]:
        with pytest.raises(ValueError, match=said):
            search(tmp_path / "none", **options)
    with pytest.raises(ValueError, match="tune: nothing is evaluated"):
        search(tmp_path / "none", tiny(evaluate=()))
    with pytest.raises(ValueError, match="did you mean 'novel'"):  # what fails in every trial fails at once
        search(tmp_path / "none", tiny(evaluate=("novell",)))
    assert not (tmp_path / "none").exists()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"tune: Optuna is not installed: pip install 'polyhead\[tune\]'"):
        search(tmp_path / "none")


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
    for text in ("[]", "{}", '{"run": 3}'):
        (tmp_path / "whole" / "study.json").write_text(text)
        with pytest.raises(ValueError, match=r"study.json|another study"):
            tune.status(tmp_path / "whole")


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


def test_the_command(tmp_path: pathlib.Path, capsys: Any, engine: type[Engine], monkeypatch: pytest.MonkeyPatch):
    ph.config.save(tiny(), tmp_path / "run.json")
    command = ["tune", str(tmp_path / "run.json"), "--train.lr=1e-4:1e-1:log", "--model.layers", "1,2", "--trials", "5"]
    command += ["--train.weight-decay", "0.2", "--folder", str(tmp_path / "study"), "--workers", "1", "--prune"]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert "trial 4: done: validation r2" in said.err
    (line,) = [line for line in said.out.splitlines() if line.startswith("train it anew: ")]
    assert "--train.weight-decay 0.2" in line
    assert not {"--trials", "--folder", "--prune", "median", "--workers"} & set(line.split())
    best = tune.status(tmp_path / "study").best
    assert f"look at it: polyhead report {best.folder}" in said.out
    runs: list[ph.Run] = []
    monkeypatch.setattr("polyhead.cli_runs.train", lambda found, **options: runs.extend(found) or 0)
    assert cli.main(line.removeprefix("train it anew: polyhead ").split()) == 0
    assert best.folder.name == f"tiny-{ph.digest(runs[0])}"
    started = len(engine.started)
    assert cli.main([*command, "--status"]) == 0
    assert "Trials in" in capsys.readouterr().out
    assert len(engine.started) == started
    for words, wrong in [
        (["--train.lr", "1e-3"], "polyhead: tune: train.lr is given a value and a range"),
        (["--train.lr", "1,2"], "polyhead: tune: train.lr is given twice"),
        (["--sampler", "grid"], "polyhead: tune: unknown sampler 'grid'"),
        (["--trails", "3"], "polyhead tune .*: unknown option --trails; did you mean --trials"),
    ]:
        assert cli.main([*command, *words]) == 2
        assert re.match(wrong, capsys.readouterr().err)
    assert cli.main(["tune", "table-a1", "--train.lr", "1e-4:1e-2"]) == 2
    assert "runs but a search is for one" in capsys.readouterr().err


def test_killed_in_the_middle(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """A real study of three trials, whose process is killed in the second."""
    monkeypatch.setattr(tune, "Local", engine_local.Local)
    code = (
        "import sys; from polyhead import tune; from polyhead.train import read_config\n"
        "tune.tune(read_config(sys.argv[1]), {'train.lr': '1e-4:1e-2:log'}, folder=sys.argv[2], trials=3)"
    )
    ph.config.save(tiny(), tmp_path / "run.json")
    folder = tmp_path / "study"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run.json"), str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(ph.__file__).parents[1])},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("trial 1: --train.lr"):
            process.send_signal(signal.SIGKILL)
            break
    process.stderr.close()
    assert process.wait() == -9
    before = tune.status(folder)
    assert [trial.state for trial in before.trials] == [tune.DONE, tune.RUNNING]
    after = tune.tune(tiny(), {"train.lr": "1e-4:1e-2:log"}, folder=folder, trials=3, progress=False)
    assert [trial.state for trial in after.trials] == [tune.DONE] * 3
    assert [trial.values for trial in after.trials[:2]] == [trial.values for trial in before.trials]
    for trial in after.trials:
        result = ph.train.read_result(trial.folder)
        assert trial.score == result.scores["validation"]["r2"]
    assert len(list(folder.glob("tiny-*"))) == 3
