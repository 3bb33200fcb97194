"""Configuration files: a printed run, changes to a recipe, groups of heads in one word."""

import pathlib

import pytest
import yaml

import polyhead as ph
from polyhead.cli import main
from polyhead.cli.files import read_heads
from polyhead.cli.train import configure
from polyhead.papers import recipes


def test_what_is_printed_is_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "fuzzy-hyla", "--train.lr", "2e-3", "--model.heads", "softmax:4,hyla", "--print"]) == 0
    pathlib.Path("mine.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    (run,), _ = configure("train", "mine.yaml", [[]])
    (expected,), _ = configure("train", "fuzzy-hyla", [["--train.lr", "2e-3"]], None, ["softmax:4,hyla"])
    assert run == expected
    assert run.model.heads == (ph.Softmax(4, dim=2, value_dim=2), ph.Hyla(8, dim=2, value_dim=2))
    assert not list(tmp_path.glob("runs*"))


def test_heads_in_a_word_keep_what_the_groups_of_the_recipe_agree_on():
    symbols = ph.RelativeSymbols()
    like = (ph.Softmax(2, dim=4, value_dim=4), ph.Relational(2, dim=8, value_dim=4, symbols=symbols, symmetric=True))
    groups = read_heads("hyla:2,disentangled:1", "x", like)
    assert groups == (ph.Hyla(2, value_dim=4), ph.Disentangled(1, value_dim=4, symbols=symbols, symmetric=True))


def test_a_file_says_what_differs_of_a_recipe_or_another_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {
        "recipe": "other.yaml",
        "model": {"heads": "softmax:2+hyla:2", "feedforward": {"kind": "Swiglu"}},
        "train": {"lr": "2e-3", "evaluate": ["iid"]},
    }
    pathlib.Path("mine.yaml").write_text(yaml.safe_dump(changes))
    pathlib.Path("other.yaml").write_text("recipe: fuzzy-hyla\ntrain: {lr: 1.0e-3, warmup: 9}\n")
    (run,), _ = configure("train", "mine.yaml", [["--train.steps", "7"]])
    base = recipes.RECIPES["fuzzy-hyla"]()
    assert run.model.heads == (ph.Softmax(2, dim=2, value_dim=2), ph.Hyla(2, dim=2, value_dim=2))
    assert run.model.feedforward == ph.Swiglu()
    assert (run.train.lr, run.train.steps, run.train.evaluate, run.train.warmup) == (2e-3, 7, ("iid",), 9)
    assert (run.task, run.model.dim, run.train.batch_size) == (base.task, base.model.dim, base.train.batch_size)
    pathlib.Path("other.yaml").write_text("recipe: sorting-dual\nmodel: {encoder: null}\n")
    assert configure("train", "other.yaml", [["--task.length", "9"]])[0][0].model.encoder is None


@pytest.mark.parametrize(("recipe", "field", "value"), [("fuzzy-hyla", "length", 16), ("sraven-hyla", "grid", 2)])
def test_a_file_and_the_command_line_mean_the_same(tmp_path, monkeypatch, recipe, field, value):
    """The model's length follows the task's, unless it is given."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.yaml").write_text(f"recipe: {recipe}\ntask: {{{field}: {value}}}\n")
    (run,), _ = configure("train", "mine.yaml", [[]])
    (expected,), _ = configure("train", recipe, [[f"--task.{field}", str(value)]])
    assert run == expected
    assert getattr(run.task, field) == value
    pathlib.Path("mine.yaml").write_text(f"recipe: {recipe}\ntask: {{{field}: {value}}}\nmodel: {{max_length: 99}}\n")
    assert configure("train", "mine.yaml", [[]])[0][0].model.max_length == 99
