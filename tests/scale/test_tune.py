"""Searches: the same settings give the same trials after any interruption; a failed trial does not end a search.  The
search space on the command line."""

import dataclasses
import functools
import io
import json
import os
import pickle
import re
import sys

import fake_workers
import forked
import pytest
from refusals import refusing
from rich.console import Console
from searches import SPACE, facts, finish, install, score, search, tiny, worked

import polyhead as ph
from polyhead.cli import dispatch as cli
from polyhead.cli.train import configured
from polyhead.scale.sweep.engines import local as engine_local
from polyhead.scale.tune import screen as tune_screen, search as tune
from polyhead.scale.tune.space import Choice, Range, changed, is_space, kinds_of, read_space, words as as_words
from polyhead.train.store.folder import read_config

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    return install(monkeypatch)


def test_a_study_is_a_function_of_its_question(tmp_path, engine):
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
def test_stopped_anywhere_it_goes_on(where, tmp_path, engine, monkeypatch):
    import optuna

    whole = search(tmp_path / "whole")
    engine.started.clear()
    count = 0

    def at_the_fourth(function, *given, **named):
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


def test_failures_are_trials(tmp_path, engine, monkeypatch):
    def work(run, folder):
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


def test_two_workers_and_one_run(tmp_path, engine, monkeypatch):
    """Two trials at a time that are one run share its worker."""
    most = 0

    def work(run, folder):
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


def test_lower_may_be_better(tmp_path, monkeypatch):
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "better", "lower")
    scores = [trial.score for trial in search(tmp_path, trials=16).trials]
    assert tune.status(tmp_path).best.score == min(scores)
    assert sum(scores[10:]) / 6 < sum(scores[:10]) / 10  # it looks where it is low


@pytest.mark.parametrize("prune", tune.PRUNERS)
def test_pruned_trials_stop_and_keep_what_they_have(prune, tmp_path, engine, monkeypatch):
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


def test_a_pruned_trial_is_not_restarted_if_its_worker_is_killed_before_it_has_saved(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(engine, "work", staticmethod(worked))
    monkeypatch.setattr(fake_workers.Handle, "terminate", lambda handle: setattr(handle, "ended", -9))
    found = search(tmp_path, trials=12, prune="median")
    assert tune.PRUNED in [trial.state for trial in found.trials]
    assert len(engine.started) == 12


def test_a_folder_holds_one_study(tmp_path):
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


def test_a_damaged_record(tmp_path, engine):
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


def test_what_is_seen_on_a_terminal(tmp_path, monkeypatch):
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


def test_the_record_is_plain_text(tmp_path, monkeypatch):
    import optuna

    search(tmp_path, trials=2)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    assert len(search(tmp_path, trials=3).trials) == 3
    journal = optuna.storages.journal
    assert not hasattr(journal.JournalFileBackend, "load_snapshot")  # where Optuna would unpickle
    for line in (tmp_path / "study.journal").read_text().splitlines():
        json.loads(line)


def test_killed_in_the_middle(tmp_path, monkeypatch):
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


# ----------------------------------------------------------------------------------------------- space, command line
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
def test_bad_ranges_are_one_line(space, said, tmp_path):
    with refusing(f"tune: {said}"):
        search(tmp_path / "none", space=space)
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


def test_the_words_of_values_are_read_again(tmp_path):
    """A flag takes no value."""
    run = tiny()
    values = {"model.causal": True, "train.early_floor": False, "model.final_norm": True, "train.clip": None}
    said = as_words(run, values | {"train.lr": 0.25})
    assert said[:2] == ["--model.causal", "--train.no-early_floor"]
    ph.config.save(changed(run, {"train.early_floor": True}), tmp_path / "run.json")
    (found,), _ = configured("train", str(tmp_path / "run.json"), [said])
    assert found == changed(run, values | {"train.lr": 0.25})


def test_heads_in_one_word_are_fixed(tmp_path, monkeypatch):
    found: list[object] = []
    monkeypatch.setattr("polyhead.cli.tune.answer", lambda *given: found.extend(given) or 0)
    ph.config.save(tiny(), tmp_path / "run.json")
    words = ["--model.heads", "softmax:1,hyla:2", "--model.heads.1.value_depth", "1,2", "--folder", "runs/a,b"]
    assert cli.main(["tune", str(tmp_path / "run.json"), *words]) == 0
    run, space, _, line = found
    assert run.transformer.heads == (ph.Softmax(1), ph.Hyla(2))
    assert (space, run.folder) == ({"model.heads.1.value_depth": "1,2"}, "runs/a,b")
    assert line == ["polyhead", "train", str(tmp_path / "run.json"), "--model.heads", "softmax:1,hyla:2"]


def test_bad_options(tmp_path):
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


def test_the_command(tmp_path, capsys, engine, monkeypatch):
    ph.config.save(tiny(), tmp_path / "run.json")
    command = ["tune", str(tmp_path / "run.json"), "--train.lr=1e-4:1e-1:log", "--model.layers", "1,2", "--trials", "5"]
    command += ["--train.weight-decay", "0.2", "--folder", str(tmp_path / "study"), "--workers", "1", "--prune"]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert "trial 4: done: validation r2" in said.err
    (line,) = [line for line in said.out.splitlines() if line.startswith("train it again: ")]
    assert "--train.weight-decay 0.2" in line
    assert not {"--trials", "--folder", "--prune", "median", "--workers"} & set(line.split())
    best = tune.status(tmp_path / "study").best
    assert f"look at it: polyhead report {best.folder}" in said.out
    runs: list[ph.Run] = []
    monkeypatch.setattr("polyhead.cli.train.train", lambda found, **options: runs.extend(found) or 0)
    assert cli.main(line.removeprefix("train it again: polyhead ").split()) == 0
    assert best.folder.name == f"tiny-{ph.digest(runs[0])}"
    started = len(engine.started)
    assert cli.main([*command, "--status"]) == 0
    assert cli.main(["tune", str(tmp_path / "run.json"), "--folder", str(tmp_path / "study"), "--status"]) == 0
    told = capsys.readouterr().out
    assert told.count("Trials in") == 2
    assert len(engine.started) == started
    for line in [line for line in told.splitlines() if line.startswith("train it again: ")]:
        assert cli.main(line.removeprefix("train it again: polyhead ").split()) == 0
    assert [ph.digest(run) for run in runs] == [ph.digest(runs[0])] * 3
    assert runs[2].folder != str(best.folder)
