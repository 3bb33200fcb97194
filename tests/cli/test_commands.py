"""Every command: what it prints and what it leaves on the disk."""

import json
import pathlib
from dataclasses import replace
from unittest import mock

import pytest
from commands import ask, small

import polyhead as ph
from polyhead.cli import train as cli_train
from polyhead.cli.dispatch import VERBS
from polyhead.cli.train import configure
from polyhead.config import save
from polyhead.pages import report
from polyhead.papers import recipes
from polyhead.train import read_config, read_result


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """Recipes `small` and `pair`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    baselines = ph.tasks.FuzzyLogic.baselines
    monkeypatch.setattr(
        ph.tasks.FuzzyLogic, "baselines", lambda *args, **options: baselines(*args, **{**options, "sequences": 50})
    )
    monkeypatch.setitem(recipes.RECIPES, "small", small)
    monkeypatch.setitem(recipes.RECIPES, "pair", lambda: [small("a-0"), small("a-1", seed=1)])


# ----------------------------------------------------------------------------------------------------------------- help
def test_the_overview_names_every_command(capsys):
    overview = ask(capsys, "--help")
    assert all(f"• {verb} " in overview for verb in VERBS)
    assert "complete" in ask(capsys, "--tyro-print-completion bash")
    assert ask(capsys, "--version").strip() == ph.__version__


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help_with_an_example(capsys, verb):
    printed = ask(capsys, f"{verb} --help")
    assert f"usage: polyhead {verb}" in printed
    assert f"examples:\n  polyhead {verb}" in printed


# ---------------------------------------------------------------------------------------------------------------- lists
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("recipes", ["fuzzy-hyla", "games-dual", "polyhead train NAME"]),
        ("figures", ["fig-2c", "small, short, paper", "polyhead reproduce NAME"]),
        ("tasks", ["FuzzyLogic", "held_out", "r2"]),
        ("mechanisms", ["Disentangled", "sum_h W_out_h"]),
        ("implementations", ["softmax", "hyla", "reference", "native"]),
        ("models", ["fuzzy-hyla-1", "r2 0.949", "polyhead eval NAME"]),
    ],
)
def test_lists_name_what_there_is(capsys, kind, words):
    printed = " ".join(ask(capsys, f"list {kind}").replace("│", " ").split())
    assert [word for word in words if word not in printed] == []


# ---------------------------------------------------------------------------------------------------------------- verbs
@pytest.mark.usefixtures("recipe")
def test_train_changes_any_field(capsys, tmp_path):
    options = "--model.dim 16 --model.heads.0.act silu --model.causal --train.lr 3e-4 --train.clip 1"
    options += " --train.evaluate novel --task.held-out 0.7 --threads 1 --device cpu --deterministic"
    printed = ask(capsys, f"train small --seed 5 {options}")
    (folder,) = (path.parent for path in tmp_path.rglob("result.json"))
    run = read_config(folder)
    assert folder == tmp_path / "runs" / f"small-{ph.digest(run)}"
    default = small()
    model = replace(default.transformer, dim=16, heads=(ph.Hyla(2, act="silu"),), causal=True)
    train = replace(default.train, lr=3e-4, evaluate=("novel",), clip=1.0)
    expected = replace(default, seed=5, task=replace(default.task, held_out=0.7), model=model, train=train)
    assert ph.digest(run) == ph.digest(expected)
    assert (run.device, run.deterministic, run.threads) == ("cpu", True, 1)
    assert "novel" in printed
    assert "4 steps" in printed


@pytest.mark.parametrize(
    ("recipe_name", "words", "model_length", "encoder_length"),
    [
        ("sorting-dual", ["--task.length", "9"], 9, 9),
        ("maths-dual", ["--task.question", "90", "--task.answer", "8"], 9, 90),
        ("sorting-dual", ["--task.length", "9", "--model.encoder.max-length", "7"], 9, 7),
    ],
)
def test_a_changed_task_changes_the_lengths_of_the_model(recipe_name, words, model_length, encoder_length):
    (run,), _ = configure("train", recipe_name, [words])
    assert (run.model.max_length, run.model.encoder.max_length) == (model_length, encoder_length)


@pytest.mark.usefixtures("recipe")
def test_a_finished_run_is_trained_again_only_with_again(capsys):
    save(small(threads=1, deterministic=True), "mine.json")
    checkpoint = pathlib.Path("here/checkpoint.safetensors")
    ask(capsys, "train mine.json --folder here --seed 2")
    assert read_config("here").seed == 2
    written = checkpoint.stat().st_mtime_ns
    ask(capsys, "train mine.json --folder here --seed 2")
    result = read_result("here")
    pathlib.Path("here/result.json").unlink()
    assert "small: 4 steps" in ask(capsys, "resume here --device cpu")
    assert read_result("here").scores == result.scores
    assert read_config("here").deterministic
    assert checkpoint.stat().st_mtime_ns == written
    ask(capsys, "train here/config.json --again")
    assert checkpoint.stat().st_mtime_ns > written


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(("words", "seeds"), [("", [0, 1]), ("--seed 4 --workers 3 --folder out", [4, 5])])
def test_a_recipe_of_several_runs_is_a_sweep_and_a_seed_moves_their_seeds(capsys, monkeypatch, words, seeds):
    def sweep(runs, folder, **options):
        assert [run.seed for run in runs] == seeds
        return [ph.train.run(replace(run, folder=f"{folder}/{run.name}"), progress=False) for run in runs]

    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", sweep)
    printed = ask(capsys, f"train pair --threads 1 {words}")
    assert all(f"a-{seed}: 4 steps" in printed for seed in seeds)


@pytest.mark.usefixtures("recipe")
def test_eval_scores_splits_beside_their_baselines_and_changes_nothing(capsys):
    ph.train.run(small(folder="here", threads=1, seed=3), progress=False)
    before = {path.name: path.read_bytes() for path in pathlib.Path("here").iterdir()}
    command = "eval here --batches 1 --batch-size 2 --splits iid compositional --device cpu"
    printed = ask(capsys, command)
    scores = read_result("here").scores["compositional"]
    assert f"{scores['r2']:.3f} ± {scores['r2_se']:.3f}" in printed
    assert all(name in printed for name in ("gaussian process", "ceiling", "compositional: unseen combinations"))
    assert ask(capsys, command) == printed
    assert ask(capsys, f"{command} --checkpoint 2") != printed
    whole_batches = json.loads(ask(capsys, "eval here --splits iid --device cpu --json"))["scores"]["iid"]
    train = small().train  # its numbers of batches and of sequences are the defaults
    assert whole_batches["sequences"] == train.eval_batches * train.batch_size
    assert ask(capsys, f"{command} --seed 9") != printed
    assert {path.name: path.read_bytes() for path in pathlib.Path("here").iterdir()} == before


@pytest.mark.usefixtures("recipe")
def test_probe_shows_layers_from_one(capsys):
    ph.train.run(small(folder="here", threads=1), progress=False)
    rows = json.loads(ask(capsys, "probe here --sequences 200 --seed 1 --json"))
    assert {row["layer"] for row in rows} == {1}


@pytest.mark.usefixtures("recipe")
def test_report_writes_a_page_of_the_runs(capsys):
    ph.train.run(small(folder="here", threads=1), progress=False)
    with mock.patch.object(report, "write", return_value=pathlib.Path("page.html")) as write:
        assert ask(capsys, "report here --out page.html --title Mine") == "report: page.html\n"
    write.assert_called_once_with([pathlib.Path("here")], pathlib.Path("page.html"), title="Mine", static=None)


def test_scores_are_shown_where_baselines_cannot_be_computed(capsys, monkeypatch):
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "baselines", mock.Mock(side_effect=ValueError("baselines: too many")))
    cli_train.write_scores(small(), {"a": {"iid": {"r2": 0.5, "r2_se": 0.125}}})
    printed = capsys.readouterr().out
    assert "0.500 ± 0.125" in printed
    assert printed.endswith("No baselines and ceiling: baselines: too many\n")
