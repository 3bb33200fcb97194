"""The search space on the command line, and the command."""

import pathlib
import re
from typing import Any

import pytest
from searches import Engine, install, search, tiny

import polyhead as ph
from polyhead.cli import verbs as cli
from polyhead.cli.train import configured
from polyhead.scale.tune import search as tune
from polyhead.scale.tune.space import Choice, Range, changed, is_space, kinds_of, read_space, words as as_words

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    return install(monkeypatch)


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


def test_the_words_of_values_are_read_again(tmp_path: pathlib.Path):
    """A flag takes no value."""
    run = tiny()
    values = {"model.causal": True, "train.early_floor": False, "model.final_norm": True, "train.clip": None}
    said = as_words(run, values | {"train.lr": 0.25})
    assert said[:2] == ["--model.causal", "--train.no-early_floor"]
    ph.config.save(changed(run, {"train.early_floor": True}), tmp_path / "run.json")
    (found,), _ = configured("train", str(tmp_path / "run.json"), [said])
    assert found == changed(run, values | {"train.lr": 0.25})


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


def test_the_command(tmp_path: pathlib.Path, capsys: Any, engine: type[Engine], monkeypatch: pytest.MonkeyPatch):
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
