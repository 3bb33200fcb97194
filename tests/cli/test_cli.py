"""The command line: every verb, its help, and its tables."""

import json
import pathlib
import re
import shlex
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polyhead as ph
from polyhead import spec
from polyhead.cli import demo as cli_demo, main, text as cli_text, verbs as cli
from polyhead.cli.train import configured
from polyhead.config import save
from polyhead.layers.symbols import PositionSymbols
from polyhead.pages import report
from polyhead.papers import recipes, reproduce
from polyhead.scale.sweep import Failure
from polyhead.train import Result, read_config, read_result
from polyhead.train.store.folder import read_metrics


def small(name: str = "small", **changes: Any) -> Any:
    task = ph.tasks.FuzzyLogic(length=6)
    model = ph.TransformerConfig(*task.ends, dim=8, layers=1, heads=(ph.Hyla(2),), max_length=6)
    train = ph.Train(steps=3, batch_size=2, warmup=1, eval_batches=1, log_every=1)
    return replace(ph.Run(name=name, task=task, model=model, train=train), **changes)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Recipes `small` and `pair`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    floors = ph.tasks.FuzzyLogic.floors
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "floors", lambda *args, **more: floors(*args, **{**more, "sequences": 50}))
    monkeypatch.setitem(recipes.RECIPES, "small", small)
    monkeypatch.setitem(recipes.RECIPES, "pair", lambda: (small("one"), small("two", seed=1)))


def ask(capsys: Any, command: str) -> str:
    """What a command prints; it must succeed."""
    code = cli.main(shlex.split(command))
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def only_run(tmp_path: pathlib.Path) -> pathlib.Path:
    (folder,) = (path.parent for path in tmp_path.rglob("result.json"))
    return folder


# ----------------------------------------------------------------------------------------------------------------- help
def test_help_names_every_verb(capsys: Any):
    said = ask(capsys, "--help").splitlines()
    for verb in cli.VERBS:
        assert any(line.startswith(f"  {verb} ") for line in said)


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_verb_explains_itself_with_examples(capsys: Any, verb: str):
    text = ask(capsys, f"{verb} --help")
    assert "usage: polyhead " + verb in text
    assert "examples:\n  polyhead " + verb in text
    if verb in ("demo", "resume", "eval", "probe"):
        assert all(flag in text for flag in ("--device", "--seed", "--deterministic"))


def test_a_recipe_lists_its_fields(capsys: Any):
    text = ask(capsys, "train fuzzy-hyla --help")
    for flag in (
        "--train.lr",
        "--model.heads.0.value-depth",
        "--task.held-out",
        "--seed",
        "--device",
        "--deterministic",
    ):
        assert flag in text
    assert "--again" in text


def test_no_command_is_a_mistake(capsys: Any):
    assert cli.main([]) == 2
    assert "usage: polyhead COMMAND" in capsys.readouterr().out


def test_the_version(capsys: Any):
    assert ask(capsys, "--version").strip() == ph.__version__


# --------------------------------------------------------------------------------------------------------------- tables
@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        (
            "recipes",
            [f"demo 8 600 {recipes.MINUTES['demo']} The", "fuzzy-hyla 1 15000 12.5 HYLA at", "games, sorting, order"],
        ),
        ("tasks", ["FuzzyLogic", "compositional", "held_out=0.5", "r2"]),
        ("mechanisms", ["Softmax", "Linear", "Hyla", "rms_heads(q_th", "s (d + 2", "value_weight"]),
        ("mechanisms", ["Relational", "= 12,416; 8 heads: 99,328", "s m = 32,768"]),
        ("mechanisms --dim 64 --heads 4 --length 10", ["Disentangled", "; 4 heads: 24,576", "s: keys a token"]),
        ("impls", ["softmax", "native, sdpa, blocked, reference", "hyla", "blocked, reference", "native"]),
    ],
)
def test_lists(capsys: Any, what: str, wanted: list[str]):
    text = " ".join(ask(capsys, f"list {what}").replace("│", " ").split())
    assert all(word in text for word in wanted), text


def test_figures_are_listed_with_what_they_take(capsys: Any):
    assert "polyhead train NAME --help" in ask(capsys, "list figures")
    rows = [" ".join(" ".join(str(value) for value in row.values()).split()) for row in cli_text.figures()]
    for row in (
        "fig-a7 Fig. A7: codes of a deep softmax model 1 1.2 24 20-200",
        "fig-2b Fig. 2B: terms decoded from the latent code 9 8.4 9 (101) 36 2-3",
        "set SET 30 4 100",
        "table-a2 Table A2: ambiguous instances 0 0",
    ):
        assert row in rows


def test_every_recipe_is_listed_and_the_list_is_short(capsys: Any):
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
    assert sorted(name for names in recipes.FAMILIES.values() for name in names) == sorted(recipes.STUDIES)


def built(mechanism: Any, heads: int, dim: int) -> Any:
    return ph.MultiHeadAttention(dim, [getattr(ph, mechanism.config)(heads)], own_symbols=False)


@pytest.mark.parametrize("mechanism", spec.MECHANISMS, ids=lambda mechanism: mechanism.config)
@pytest.mark.parametrize(("dim", "heads"), [(48, 4), (40, 2)])
def test_the_listed_parameters_are_those_of_a_layer(mechanism: Any, dim: int, heads: int):
    rows, _ = cli_text.mechanisms(dim, heads, 7)
    text = next(row["parameters per head"] for row in rows if row["mechanism"] == mechanism.config)
    count = sum(p.numel() for p in built(mechanism, heads, dim).parameters())
    assert f"\n= {count // heads:,}; {heads} heads: {count:,}\n" in text + "\n"
    symbols = sum(p.numel() for p in PositionSymbols(dim, max_length=7).parameters())
    assert text.endswith(f"layers:\ns m = {symbols:,}") == mechanism.reads_symbols


@pytest.mark.parametrize(
    "mechanism", [m for m in spec.MECHANISMS if m.config != "Linear"], ids=lambda mechanism: mechanism.config
)
def test_the_listed_work_is_what_the_equations_multiply(mechanism: Any):
    """Matrix multiplications of the reference, counted as they run: each multiply-add is two operations."""
    dim, heads, tokens = 24, 3, 5
    layer = ph.MultiHeadAttention(dim, [getattr(ph, mechanism.config)(heads, impl="reference")], own_symbols=False)
    x = torch.randn(1, tokens, dim)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x, symbols=x if mechanism.reads_symbols else None)
    rows, _ = cli_text.mechanisms(dim, heads, tokens)
    text = next(row["multiply-adds per head and token"] for row in rows if row["mechanism"] == mechanism.config)
    # Of pooled heads the products of code and hidden layer are pooled, not added: no matrix multiplication.
    beside = tokens * dim if mechanism.config == "Pooled" else 0
    assert f"{heads} heads: {counter.get_total_flops() // (2 * tokens) + beside:,}\n" in text + "\n"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("list tasks --dim 64", "polyhead list: --dim is for mechanisms but tasks were asked for"),
        ("list mechanisms --dim 10", "polyhead list: --heads must divide --dim 10 but is 8"),
        ("list mechanisms --length 0", "polyhead list: --length must be at least 1 but is 0"),
        ("list mechanism", "polyhead list: unknown kind 'mechanism'; did you mean 'mechanisms'?"),
    ],
)
def test_a_list_that_cannot_be(capsys: Any, command: str, text: str):
    assert cli.main(shlex.split(command)) == 2
    said = capsys.readouterr().err
    assert said.startswith(text)
    assert said.count("\n") == 1


@pytest.mark.parametrize(("module", "name"), [("rich.table", "rich"), ("yaml", "PyYAML")])
def test_a_package_of_the_core_that_is_missing_is_one_line(monkeypatch: Any, capsys: Any, module: str, name: str):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["train", "fuzzy-hyla", "--print"] if module == "yaml" else ["list", "mechanisms"]) == 1
    assert capsys.readouterr().err == f"polyhead needs {name}: pip install 'polyhead'\n"


def test_a_package_of_the_user_that_is_missing_is_not_disguised(monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "polyhead.cli.listing", None)
    monkeypatch.delitem(sys.modules, "polyhead.cli.verbs")
    with pytest.raises(ModuleNotFoundError, match=r"polyhead\.cli\.listing"):
        main(["list", "mechanisms"])


def test_a_table_keeps_brackets_and_rounds(capsys: Any):
    cli_text.table("t", [{"a": "[red]x[/red]", "b": 0.12345}])
    text = capsys.readouterr().out
    assert "[red]x[/red]" in text
    assert "0.123 " in text


# ---------------------------------------------------------------------------------------------------------------- verbs
@pytest.mark.usefixtures("recipe")
def test_train_changes_any_field(capsys: Any, tmp_path: pathlib.Path):
    model = "--model.dim 16 --model.heads.0.act silu --model.causal"
    train = "--train.lr 3e-4 --train.clip 1 --train.evaluate novel --task.held-out 0.7"
    said = ask(capsys, f"train small --seed 5 {model} {train} --threads 1 --device cpu --deterministic")
    folder = only_run(tmp_path)
    run = read_config(folder)
    assert folder == tmp_path / "runs" / f"small-{ph.digest(run)}"
    default = small()
    wanted = replace(
        default,
        seed=5,
        task=replace(default.task, held_out=0.7),
        model=replace(default.model, dim=16, heads=(ph.Hyla(2, act="silu"),), causal=True),
        train=replace(default.train, lr=3e-4, evaluate=("novel",), clip=1.0),
    )
    assert ph.digest(run) == ph.digest(wanted)
    assert (run.device, run.deterministic, run.threads) == ("cpu", True, 1)
    assert "novel" in said
    assert "3 steps" in said


@pytest.mark.usefixtures("recipe")
def test_a_changed_task_changes_the_ends_and_the_length(capsys: Any, tmp_path: pathlib.Path):
    ask(capsys, "train small --task.variables 3 --task.length 9 --threads 1")
    run = read_config(only_run(tmp_path))
    assert run.model.inputs == ph.Vectors(4)
    assert run.model.max_length == 9


def test_what_an_encoder_reads_grows_with_the_task():
    (run,), _ = configured("train", "sorting-dual", [["--task.length", "9"]])
    assert (run.model.max_length, run.model.encoder.max_length) == (9, 9)
    (run,), _ = configured("train", "maths-dual", [["--task.question", "90", "--task.answer", "8"]])
    assert (run.model.max_length, run.model.encoder.max_length) == (9, 90)
    (run,), _ = configured("train", "sorting-dual", [["--task.length", "9", "--model.encoder.max-length", "7"]])
    assert (run.model.max_length, run.model.encoder.max_length) == (9, 7)


@pytest.mark.usefixtures("recipe")
def test_a_file_and_then_again(capsys: Any, tmp_path: pathlib.Path):
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
def test_a_recipe_of_several_runs_is_a_sweep(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    def sweep(runs: Any, folder: Any, *, workers: Any = None, again: bool = False) -> list[Any]:
        assert ([run.name for run in runs], [run.seed for run in runs], folder, workers) == (
            ["one", "two"],
            [4, 5],
            "out",
            3,
        )
        return [ph.train.run(replace(run, folder=f"{folder}/{run.name}"), progress=False) for run in runs]

    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", sweep)
    said = ask(capsys, "train pair --seed 4 --workers 3 --folder out --threads 1")
    assert "one: 3 steps" in said
    assert "two: 3 steps" in said


@pytest.mark.parametrize(("asked", "seeds"), [("", [0, 1]), (" --seed 0", [0, 1]), (" --seed 4", [4, 5])])
def test_a_seed_moves_the_seeds_of_a_recipe_that_has_several(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, asked: str, seeds: list[int]
):
    came: list[Any] = []
    monkeypatch.setitem(recipes.RECIPES, "seeds", lambda: (small("a-0"), small("a-1", seed=1)))
    monkeypatch.setattr(
        "polyhead.scale.sweep.jobs.sweep", lambda runs, folder, **options: came.extend([*runs, options]) or []
    )
    ask(capsys, "train seeds --again" + asked)
    assert [(run.name, run.seed) for run in came[:2]] == [(f"a-{seed}", seed) for seed in seeds]
    assert came[2] == {"workers": None, "again": True}


@pytest.mark.usefixtures("recipe")
def test_eval_scores_splits_over_their_floors(capsys: Any):
    ph.train.run(small(folder="here", threads=1, seed=3), progress=False)
    before = {p.name: p.read_bytes() for p in pathlib.Path("here").iterdir()}
    command = "eval here --batches 1 --batch-size 2 --splits iid compositional --device cpu"
    said = ask(capsys, command)
    result = read_result("here")
    assert result is not None
    assert f"{result.scores['compositional']['r2']:.3f} ± {result.scores['compositional']['r2_se']:.3f}" in said
    for name in ("context mean", "gaussian process", "ceiling"):
        assert name in said
    assert ask(capsys, command) == said
    model = [line for line in ask(capsys, f"{command} --seed 9").splitlines() if "small" in line]
    assert model
    assert model[0] not in said
    assert "novel" in ask(capsys, "eval here --batches 1 --batch-size 2")
    assert {p.name: p.read_bytes() for p in pathlib.Path("here").iterdir()} == before


@pytest.mark.usefixtures("recipe")
def test_deterministic_reaches_eval_and_probe(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    ph.train.run(small(folder="here", threads=1), progress=False)
    asked: list[bool] = []
    monkeypatch.setattr("polyhead.train.device.be_deterministic", lambda: asked.append(True))
    ask(capsys, "eval here --batches 1 --batch-size 2 --splits iid")
    assert asked == []
    ask(capsys, "eval here --batches 1 --batch-size 2 --splits iid --deterministic")
    ask(capsys, "probe here --sequences 100 --deterministic")
    assert asked == [True, True]


@pytest.mark.usefixtures("recipe")
def test_probe_and_report(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    ph.train.run(small(folder="here", threads=1), progress=False)
    said = ask(capsys, "probe here --sequences 200 --seed 1")
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
def test_demo_ends_with_the_table_and_the_report(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    def sweep(runs: Any, folder: Any, *, screen: Any, workers: Any = None) -> list[Any]:
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
def test_a_failed_run_is_named_and_the_code_is_1(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    failure = Failure("one", tmp_path, -9, "killed by signal 9")
    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", lambda runs, folder, **more: [failure])
    assert cli.main(["train", "pair"]) == 1
    assert "polyhead: one failed: killed by signal 9 (log in " in capsys.readouterr().err


@pytest.mark.usefixtures("recipe")
def test_resume_finishes(capsys: Any, tmp_path: pathlib.Path):
    run = small(folder="here", threads=1, deterministic=True)
    done = ph.train.run(run, progress=False)
    (tmp_path / "here" / "result.json").unlink()
    said = ask(capsys, "resume here --seed 0 --device cpu")
    assert "small: 3 steps" in said
    again = read_result("here")
    assert isinstance(again, Result)
    assert again.scores == done.scores
    assert read_config("here").deterministic
    assert len([row for row in read_metrics("here") if row["kind"] == "eval"]) == 2
