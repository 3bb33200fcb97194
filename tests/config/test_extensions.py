"""Tasks and recipes of users: registered, written to files and read again."""

import dataclasses
import functools
import json
import os
import sys
from typing import Any

import pytest
from scripts import ROOT

import polyhead as ph
from polyhead import extensions
from polyhead.cli import main
from polyhead.train import read_config

EXAMPLE = ROOT / "examples" / "extension"


@pytest.fixture
def example(monkeypatch):
    """The modules of the example, imported as somebody's own."""
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    monkeypatch.setattr(extensions, "_ADDED", {sort: {} for sort in extensions.GROUPS})
    before = set(sys.modules)
    import parity_heads.recipes

    yield parity_heads
    for name in set(sys.modules) - before:
        if name.startswith("parity_heads"):
            del sys.modules[name]


def short(run, folder):
    """One that is over in a moment."""
    train = dataclasses.replace(run.train, steps=2, batch_size=4, eval_batches=1, warmup=0)
    return dataclasses.replace(run, train=train, folder=str(folder))


def test_a_run_of_ones_own_task_is_written_and_read_back(example, tmp_path, monkeypatch):
    """Where its module is not imported, this is said, and nothing is called damaged."""
    run, path = short(example.recipes.parity_hyla(), tmp_path), tmp_path / "config.json"
    result = ph.train.run(run, progress=False)
    written = json.loads(path.read_text())
    assert written["task"]["kind"] == "parity_heads.task:Parity"
    assert written["model"]["kind"] == "TransformerConfig"  # ours as before
    assert ph.digest(read_config(tmp_path)) == ph.digest(run) == result.digest
    assert isinstance(ph.load(tmp_path)[1], ph.Transformer)
    assert ph.train.run(run, progress=False) == result  # finished
    for name in [name for name in sys.modules if name.startswith("parity_heads")]:
        monkeypatch.delitem(sys.modules, name)
    message = "config.json: task: parity_heads.task:Parity is not of this package; import parity_heads.task first"
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)
    monkeypatch.setenv("POLYHEAD_IMPORT", "parity_heads.task")
    run = read_config(tmp_path)
    assert run.task.bits == 8
    renamed = path.read_text().replace("task:Parity", "task:Parities")
    path.write_text(renamed)
    with pytest.raises(ValueError, match=r"parity_heads.task:Parities is not of this package"):
        read_config(tmp_path)
    assert path.read_text() == renamed
    assert not list(tmp_path.glob("*.damaged*"))


def test_the_environment_brings_what_a_module_registers(example, monkeypatch):
    assert "parity-hyla" not in extensions.added("recipes")
    monkeypatch.setenv("POLYHEAD_IMPORT", "parity_heads.registered")
    assert extensions.added("tasks") == {"Parity": example.task.Parity}
    assert extensions.added("mechanisms") == {"Cosine": example.heads.Cosine}
    assert extensions.added("recipes").keys() == {"parity-hyla", "parity-heads"}


def test_a_file_imports_nothing_and_makes_no_other_class(example, tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path / "..")
    data = {"kind": "Run", "name": "x", "task": {"kind": "trap:Task"}, "model": {}}
    with pytest.raises(ValueError, match="trap:Task is not of this package"):
        ph.config.from_dict(data)
    assert os.getcwd() not in sys.path
    with pytest.raises(ValueError, match=r"parity_heads\.heads:Cosine is no Task"):  # it is not made
        ph.config.from_dict({**data, "task": {"kind": "parity_heads.heads:Cosine"}})
    for kind in ("json:JSONDecoder", "os:system", "dataclasses:Field"):  # imported already, and no configuration
        with pytest.raises(ValueError, match="not of this package"):
            ph.config.from_dict({**data, "task": {"kind": kind}})
    monkeypatch.setenv("POLYHEAD_IMPORT", "no_such")
    with pytest.raises(ValueError, match=r"^POLYHEAD_IMPORT no_such: No module named 'no_such'"):
        ph.config.from_dict(data)


@pytest.mark.parametrize("definition", ["function", "main", "replaced", "field"])
def test_a_task_that_nobody_could_read_back_does_not_begin(example, tmp_path, monkeypatch, definition):
    if definition == "function":

        class Local(example.task.Parity):
            pass

        task = Local()
        message = "train: .*Local of .* cannot be found again by its name; define it in a module"
    elif definition == "replaced":
        task = example.task.Parity()
        monkeypatch.setattr(example.task, "Parity", type("Parity", (example.task.Parity,), {}))
        message = "train: Parity of parity_heads.task cannot be found again"
    elif definition == "field":

        @dataclasses.dataclass(frozen=True)
        class Moded(example.task.Parity):
            mode: Any = 0

        Moded.__module__, Moded.__qualname__ = example.task.__name__, "Moded"
        monkeypatch.setattr(example.task, "Moded", Moded, raising=False)
        task = Moded(mode={1: 2})
        message = "train: the run is another one when it is read from its file"
    else:
        task = example.task.Parity()
        monkeypatch.setattr(example.task.Parity, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], "Parity", example.task.Parity, raising=False)
        message = "sweep: Parity is defined in the program itself; put it in a module"
    run = dataclasses.replace(short(example.recipes.parity_hyla(), tmp_path / "run"), task=task)
    start = functools.partial(ph.train.run, run, progress=False)
    if definition == "main":
        start = functools.partial(ph.sweep, [run], tmp_path, progress=False)
    with pytest.raises(ValueError, match=message):
        start()
    assert not (tmp_path / "run").exists()


def test_what_is_registered_is_known_by_name(example, monkeypatch, capsys):
    assert ph.register(example.recipes.parity_hyla) is example.recipes.parity_hyla
    ph.register(example.recipes.parity_hyla)  # again, as when a module is loaded anew
    ph.register(example.task.Parity)
    assert ph.recipes.RECIPES["parity-hyla"]().name == "parity-hyla"
    assert main(["list", "tasks"]) == 0
    assert "Parity" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"recipes: unknown recipe 'fuzzy_hyla'; did you mean 'fuzzy-hyla'"):
        ph.recipes.RECIPES["fuzzy_hyla"]
    taken = named(example.recipes.parity_heads, "parity_hyla")
    for extension, message in (
        (taken, "'parity-hyla' is parity_heads.recipes:parity_hyla already"),
        (dict, "builtins:dict is neither a Task nor a Mechanism"),
        (lambda: None, "define it in a module"),
        (3, "give a class or a recipe, got 3"),
    ):
        with pytest.raises(ValueError, match=f"^register: .*{message}"):
            ph.register(extension)


def named(extension, name):
    """The same function or class under another name."""
    extension.__name__ = name
    return extension


def test_a_name_that_is_ours_and_theirs_is_refused(example, capsys):
    """On the command line one of the two would be taken without a word."""
    ph.register(named(example.heads.Cosine, "Softmax"))
    assert main(["train", "fuzzy-softmax", "--model.heads", "softmax:4,hyla:4", "--print"]) == 2
    message = "'Softmax' is a mechanism of polyhead; give parity_heads.heads:Cosine another name"
    assert message in capsys.readouterr().err
    ph.register(named(example.recipes.parity_hyla, "fuzzy_hyla"))
    assert main(["train", "fuzzy-hyla", "--print"]) == 2
    message = "'fuzzy-hyla' is a recipe of polyhead; give parity_heads.recipes:parity_hyla another name"
    assert capsys.readouterr().err == f"polyhead: recipes: {message}\n"


def test_the_command_line_imports_what_it_is_asked_to(tmp_path, monkeypatch, capsys):
    (tmp_path / "told.py").write_text(
        "import polyhead as ph\n@ph.register\ndef told_recipe():\n    'Said.'\n"
        "    return ph.recipes.RECIPES['fuzzy-hyla']()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(extensions, "_ADDED", {sort: {} for sort in extensions.GROUPS})
    for option in (["--import", "told"], ["--import=told"]):
        assert main(["train", "told-recipe", *option, "--help"]) == 0
        assert "Said." in capsys.readouterr().out
    sys.modules.pop("told")
    assert main(["train", "told-recipe", "--import", "no_such"]) == 2
    assert "--import no_such: No module named 'no_such'" in capsys.readouterr().err
    for word in ("", "./told.py"):  # they were a traceback, or a line that did not say what for
        assert main(["list", "tasks", f"--import={word}"]) == 2
        assert f"--import: give the name of a module, as in an import, got {word!r}" in capsys.readouterr().err
    assert main(["list", "tasks", "--import"]) == 2
    assert "--import: expected one argument" in capsys.readouterr().err
