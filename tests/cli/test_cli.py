"""The command line: every verb, its help, and its tables."""

import json
import os
import pathlib
import re
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from commands import ask, small
from torch.utils.flop_counter import FlopCounterMode

import polyhead as ph
from polyhead import spec
from polyhead.cli import demo as cli_demo, dispatch as cli, main, text as cli_text, train as cli_train
from polyhead.cli.output import short_warnings
from polyhead.cli.train import configured
from polyhead.config import BlindToOrder, save
from polyhead.layers.symbols import PositionSymbols
from polyhead.pages import report
from polyhead.papers import recipes, reproduce
from polyhead.scale.sweep import Failure
from polyhead.train import Result, read_config, read_result


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """Recipes `small` and `pair`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    floors = ph.tasks.FuzzyLogic.floors
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "floors", lambda *args, **more: floors(*args, **{**more, "sequences": 50}))
    monkeypatch.setitem(recipes.RECIPES, "small", small)
    monkeypatch.setitem(recipes.RECIPES, "pair", lambda: (small("a-0"), small("a-1", seed=1)))


# ----------------------------------------------------------------------------------------------------------------- help
def test_the_overview(capsys):
    said = ask(capsys, "--help")
    assert all(f"\n  {verb} " in said for verb in cli.VERBS)
    assert cli.main([]) == 2
    assert capsys.readouterr().out == said
    assert ask(capsys, "--version").strip() == ph.__version__


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_verb_explains_itself_with_examples(capsys, verb):
    text = ask(capsys, f"{verb} --help")
    assert "usage: polyhead " + verb in text
    assert "examples:\n  polyhead " + verb in text
    if verb in ("demo", "resume", "eval", "probe"):
        assert all(flag in text for flag in ("--device", "--seed", "--deterministic"))


# --------------------------------------------------------------------------------------------------------------- tables
@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("recipes", [f"demo 8 600 {recipes.MINUTES['demo']} The", "fuzzy-hyla 1 15000 12.5", "games, sorting, order"]),
        ("tasks", ["FuzzyLogic", "compositional", "held_out=0.5", "r2"]),
        ("mechanisms", ["Softmax", "Linear", "Hyla", "rms_heads(q_th", "s (d + 2", "value_weight"]),
        ("mechanisms --dim 64 --heads 4 --length 10", ["Disentangled", "; 4 heads: 24,576", "s: keys a token"]),
        ("impls", ["softmax", "native, sdpa, blocked, reference", "hyla", "blocked, reference", "native"]),
    ],
)
def test_lists(capsys, what, wanted):
    text = " ".join(ask(capsys, f"list {what}").replace("│", " ").split())
    assert all(word in text for word in wanted), text


def test_every_recipe_is_listed_and_the_list_is_short(capsys):
    assert "polyhead train NAME --help" in ask(capsys, "list figures")
    said = ask(capsys, "list recipes")
    assert set(recipes.RECIPES) <= set(re.findall(r"[\w-]+", said))
    assert said.count("\n") < 100
    assert {row["recipe"] for row in cli_text.recipes()}.isdisjoint(recipes.STUDIES)
    some = ("fig-a7", "fig-2b", "set", "table-a2")  # all of them are thousands of runs
    figures = [row for row in cli_text.figures() if row["figure"] in some]
    listed = {"recipes": cli_text.recipes(), "families": cli_text.families(), "figures": figures}
    assert listed == cli_text.listed_now(some), cli_text.listed_now.__doc__
    assert {row["figure"]: (row["what"], row["GPU minutes a run"]) for row in cli_text.figures()} == {
        name: (figure.title, figure.gpu) for name, figure in reproduce.FIGURES.items()
    }


def test_a_recipe_without_a_docstring_is_listed():
    row = {"recipe": "mine", "runs": 1, "steps": 4, "core minutes": "not measured", "what": ""}
    assert cli_text._recipe("mine", lambda: small()) == row
    assert cli_text._recipe("mine", lambda: [small(), small()]) == {**row, "runs": 2}


def test_a_recipe_may_return_a_list(monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "mine", lambda: [small("a"), small("b")])
    assert [run.name for run in configured("train", "mine", [["--seed", "3"]])[0]] == ["a", "b"]


def test_a_task_of_ones_own_without_defaults_is_listed(monkeypatch):
    """It was a traceback, also where an installed package brings the task."""

    @dataclass(frozen=True)
    class Own(ph.tasks.ObjectSorting):
        """Mine."""

        path: str = field(kw_only=True)

    monkeypatch.setattr("polyhead.config.extensions.added", lambda sort: {"Own": Own})
    *_, row = cli_text.tasks()
    assert (row["task"], row["what"], row["splits"], row["metric"]) == ("Own", "Mine.", "not known", "accuracy")
    assert row["fields"].endswith(", path")


@pytest.mark.parametrize("mechanism", spec.MECHANISMS, ids=lambda mechanism: mechanism.config)
@pytest.mark.parametrize(("dim", "heads"), [(48, 4), (40, 2)])
def test_the_listed_parameters_and_work_are_those_of_a_layer(mechanism, dim, heads):
    """Matrix multiplications of the reference are counted as they run: each multiply-add is two operations."""
    tokens = 7
    rows, _ = cli_text.mechanisms(dim, heads, tokens)
    _, _, size, work = next(row.values() for row in rows if row["mechanism"] == mechanism.config)
    layer = ph.MultiHeadAttention(dim, [getattr(ph, mechanism.config)(heads, impl="reference")], own_symbols=False)
    count = sum(p.numel() for p in layer.parameters())
    assert f"\n= {count // heads:,}; {heads} heads: {count:,}\n" in size + "\n"
    symbols = sum(p.numel() for p in PositionSymbols(dim, max_length=tokens).parameters())
    assert size.endswith(f"layers:\ns m = {symbols:,}") == mechanism.reads_symbols
    x = torch.randn(1, tokens, dim)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x, symbols=x if mechanism.reads_symbols else None)
    # Of pooled heads the products of code and hidden layer are pooled, not added: no matrix multiplication.
    beside = tokens * dim if mechanism.config == "Pooled" else 0
    told = f"{heads} heads: {counter.get_total_flops() // (2 * tokens) + beside:,}\n" in work + "\n"
    assert told or mechanism.config == "Linear"  # whose table has the recurrent form


@pytest.mark.parametrize(("module", "name"), [("rich.table", "rich"), ("yaml", "PyYAML")])
def test_a_package_of_the_core_that_is_missing_is_one_line(monkeypatch, capsys, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["train", "fuzzy-hyla", "--print"] if module == "yaml" else ["list", "mechanisms"]) == 1
    assert capsys.readouterr().err == f"polyhead needs {name}: pip install 'polyhead'\n"


def test_a_package_of_the_user_that_is_missing_is_not_disguised(monkeypatch):
    monkeypatch.setitem(sys.modules, "polyhead.cli.listing", None)
    with pytest.raises(ModuleNotFoundError, match=r"polyhead\.cli\.listing"):
        main(["list", "mechanisms"])


def test_a_table_keeps_brackets_and_rounds(capsys):
    cli_text.table("runs:b:t", [{"a": "[red]x[/red]", "b": 0.12345, ":key:": "k:x:v"}])
    text = capsys.readouterr().out
    assert all(words in text for words in ("[red]x[/red]", "0.123 ", "runs:b:t", ":key:", "k:x:v"))  # no emoji


@pytest.mark.parametrize("command", ["--version", "list --help", "list recipes"])
def test_a_pipe_that_is_closed_is_no_error(monkeypatch, command):
    """As `| head -1` closes it: rich ended with 1, and Python complained at its end of what was not yet written."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(command.split()) == 0


def test_a_warning_of_ours_is_one_line():
    plain = warnings.formatwarning
    with short_warnings():
        assert warnings.formatwarning("Transformer: x", BlindToOrder, "f.py", 3) == "polyhead: Transformer: x\n"
        assert warnings.formatwarning("y", UserWarning, "f.py", 3) == plain("y", UserWarning, "f.py", 3)
    assert warnings.formatwarning is plain


def test_runs_of_two_tasks_are_scored_each_by_its_own_metric(monkeypatch, capsys, tmp_path):
    """As those of `polyhead train demo`, one of which has failed; if for one of them lower were better."""
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "better", "lower")
    made = recipes.RECIPES["demo"]()
    runs = [made[0], made[-1], made[1]]
    failure = Failure("a-0", tmp_path, -9, "killed by signal 9")

    def finished(run):
        scores = {"iid": {"loss": 0.1, run.task.metric: 0.5, f"{run.task.metric}_se": 0.125}}
        return Result(run.name, "", 1, 1.0, 1, scores, "", {}, tmp_path)

    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", lambda *_, **__: [*map(finished, runs[:2]), failure])
    assert cli_train.train(runs) == 1
    said, told = (" ".join(text.split()) for text in capsys.readouterr())
    assert told.startswith("polyhead: a-0 failed: killed by signal 9 (log in ")
    for run in runs[:2]:
        assert f"{run.task.metric} (mean" in said
        assert f"on {run.task.name}" in said
    assert said.count("0.500 ± 0.125") == 2
    assert said.count("lower is better) on fuzzy_logic") == said.count("lower is better") == 1


# ---------------------------------------------------------------------------------------------------------------- verbs
@pytest.mark.usefixtures("recipe")
def test_train_changes_any_field(capsys, tmp_path):
    fields = "--model.dim 16 --model.heads.0.act silu --model.causal --train.lr 3e-4 --train.clip 1"
    fields += " --train.evaluate novel --task.held-out 0.7 --threads 1 --device cpu --deterministic"
    said = ask(capsys, f"train small --seed 5 {fields}")
    (folder,) = (path.parent for path in tmp_path.rglob("result.json"))
    run = read_config(folder)
    assert folder == tmp_path / "runs" / f"small-{ph.digest(run)}"
    default = small()
    model = replace(default.transformer, dim=16, heads=(ph.Hyla(2, act="silu"),), causal=True)
    train = replace(default.train, lr=3e-4, evaluate=("novel",), clip=1.0)
    wanted = replace(default, seed=5, task=replace(default.task, held_out=0.7), model=model, train=train)
    assert ph.digest(run) == ph.digest(wanted)
    assert (run.device, run.deterministic, run.threads) == ("cpu", True, 1)
    assert "novel" in said
    assert "4 steps" in said


def test_a_changed_task_changes_the_ends_and_the_lengths():
    (run,), _ = configured("train", "fuzzy-hyla", [["--task.variables", "3", "--task.length", "9"]])
    assert (run.model.inputs, run.model.max_length) == (ph.Vectors(4), 9)
    (run,), _ = configured("train", "sorting-dual", [["--task.length", "9"]])
    assert (run.model.max_length, run.model.encoder.max_length) == (9, 9)
    (run,), _ = configured("train", "maths-dual", [["--task.question", "90", "--task.answer", "8"]])
    assert (run.model.max_length, run.model.encoder.max_length) == (9, 90)
    (run,), _ = configured("train", "sorting-dual", [["--task.length", "9", "--model.encoder.max-length", "7"]])
    assert (run.model.max_length, run.model.encoder.max_length) == (9, 7)


@pytest.mark.usefixtures("recipe")
def test_a_file_and_then_again(capsys):
    save(small(threads=1), "mine.json")
    data = json.loads(pathlib.Path("mine.json").read_text())
    data["train"]["lr"] = "2e-3"  # what YAML makes of 2e-3
    pathlib.Path("mine.json").write_text(json.dumps(data))
    ask(capsys, "train mine.json --folder here --seed 2")
    run = read_config("here")
    assert (run.train.lr, run.seed) == (2e-3, 2)
    written = pathlib.Path("here/checkpoint.safetensors").stat().st_mtime_ns
    ask(capsys, "train mine.json --folder here --seed 2")
    ask(capsys, "resume here")
    assert pathlib.Path("here/checkpoint.safetensors").stat().st_mtime_ns == written
    ask(capsys, "train here/config.json --again")
    assert pathlib.Path("here/checkpoint.safetensors").stat().st_mtime_ns > written


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(
    ("words", "seeds", "how"),
    [
        ("", [0, 1], ("runs", None, False)),
        ("--seed 0 --again", [0, 1], ("runs", None, True)),
        ("--seed 4 --workers 3 --folder out", [4, 5], ("out", 3, False)),
    ],
)
def test_a_recipe_of_several_runs_is_a_sweep_and_a_seed_moves_their_seeds(capsys, monkeypatch, words, seeds, how):
    def sweep(runs, folder, *, workers=None, again=False):
        assert [(run.name, run.seed) for run in runs] == [(f"a-{seed}", seed) for seed in seeds]
        assert (folder, workers, again) == how
        return [ph.train.run(replace(run, folder=f"{folder}/{run.name}"), progress=False) for run in runs]

    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", sweep)
    said = ask(capsys, f"train pair --threads 1 {words}")
    assert all(f"a-{seed}: 4 steps" in said for seed in seeds)


@pytest.mark.usefixtures("recipe")
def test_eval_scores_splits_over_their_floors(capsys, monkeypatch):
    strict: list[bool] = []
    monkeypatch.setattr("polyhead.train.device.be_deterministic", lambda: strict.append(True))
    ph.train.run(small(folder="here", threads=1, seed=3), progress=False)
    before = {p.name: p.read_bytes() for p in pathlib.Path("here").iterdir()}
    command = "eval here --batches 1 --batch-size 2 --splits iid compositional --device cpu"
    said = ask(capsys, command)
    scores = read_result("here").scores["compositional"]
    assert f"{scores['r2']:.3f} ± {scores['r2_se']:.3f}" in said
    for name in ("context mean", "gaussian process", "ceiling"):
        assert name in said
    assert ask(capsys, command) == said == ask(capsys, f"{command} --checkpoint best")  # the last step was evaluated
    assert ask(capsys, f"{command} --checkpoint 2") != said
    assert strict == []
    assert ask(capsys, f"{command} --deterministic") == said
    assert strict == [True]
    (model,) = [line for line in ask(capsys, f"{command} --seed 9").splitlines() if "small" in line]
    assert model not in said
    assert "novel" in ask(capsys, "eval here --batches 1 --batch-size 2")
    assert {p.name: p.read_bytes() for p in pathlib.Path("here").iterdir()} == before


def test_scores_are_shown_where_floors_cannot_be_computed(capsys, monkeypatch):
    """As of a large family of functions: there was this line alone, and no score."""

    def refuse(*_, **__):
        raise ValueError("floors: too many")

    monkeypatch.setattr(ph.tasks.FuzzyLogic, "floors", refuse)
    cli_text.scores(small(), {"a": {"iid": {"r2": 0.5, "r2_se": 0.125}}})
    said = capsys.readouterr().out
    assert "0.500 ± 0.125" in said
    assert said.endswith("No floors and ceiling: floors: too many\n")


@pytest.mark.usefixtures("recipe")
def test_probe_and_report(capsys, monkeypatch):
    ph.train.run(small(folder="here", threads=1), progress=False)
    strict: list[bool] = []
    monkeypatch.setattr("polyhead.train.device.be_deterministic", lambda: strict.append(True))
    said = ask(capsys, "probe here --sequences 200 --seed 1 --deterministic")
    assert strict == [True]
    assert "term 1" in said
    assert "chance" in said
    asked: list[Any] = []
    monkeypatch.setattr(report, "write", lambda *args, **more: asked.append((args, more)) or args[1])
    assert ask(capsys, "report here --out page.html --title Mine") == "report: page.html\n"
    assert asked == [(([pathlib.Path("here")], pathlib.Path("page.html")), {"title": "Mine", "static": None})]
    monkeypatch.setenv("POLYHEAD_QUIET", "1")
    report.writer._speaker(True)("not said")
    assert capsys.readouterr().err == ""
    assert "_polyhead" in json.loads(ask(capsys, "completion bash --json"))["script"]


@pytest.mark.usefixtures("recipe")
def test_demo_ends_with_the_table_and_the_report(capsys, monkeypatch):
    def sweep(runs, folder, *, screen, workers=None):
        assert all(run.device == "cpu" and run.deterministic for run in runs)
        return [ph.train.run(replace(run, folder=f"{folder}/{run.name}"), progress=False) for run in runs]

    seen: list[Any] = []
    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", sweep)
    monkeypatch.setattr(report, "write", lambda folders, path, **more: seen.extend([*folders, *more["beside"]]) or path)
    monkeypatch.setattr(cli_demo, "UNSEEN", ("compositional", "compositional"))
    monkeypatch.setattr(recipes.demo, "race", lambda: (small("race-0", threads=1),))
    monkeypatch.setattr(recipes.demo, "fuzzy", lambda steps: (small("softmax-0", threads=1),))
    said = ask(capsys, "demo --folder out --seed 2 --device cpu --deterministic").splitlines()
    assert said[-1] == "report: out/report.html"
    table = "\n".join(said)
    assert all(word in table for word in ("HYLA", "Gaussian process", "Exact ceiling", "unseen combinations"))
    assert said[-3] == f"{report.title(seen[:1])}."
    assert seen == [pathlib.Path("out/softmax-2"), pathlib.Path("out/race-2")]
    assert [read_config(folder).seed for folder in seen] == [2, 2]


@pytest.mark.usefixtures("recipe")
def test_resume_finishes(capsys, tmp_path):
    done = ph.train.run(small(folder="here", threads=1, deterministic=True), progress=False)
    (tmp_path / "here" / "result.json").unlink()
    assert "small: 4 steps" in ask(capsys, "resume here --seed 0 --device cpu")
    assert read_result("here").scores == done.scores
    assert read_config("here").deterministic
