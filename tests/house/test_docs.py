"""The documents are correct: code runs, commands parse, links resolve, tables are complete."""

import functools
import inspect
import re
import runpy
import shlex
import sys

import pytest
import torch
from scripts import DOCUMENTS, PAGES, ROOT, short_name

import polyhead as ph
from polyhead import config
from polyhead.cli import dispatch as cli, sweep as cli_sweep, train as cli_runs
from polyhead.config import extensions

MADE = re.findall(r"^\+\+\+ b/(\S+)", (ROOT / "docs" / "howto" / "energy.patch").read_text(), re.M)
EXTRAS = (
    *("jax", "flax", "haiku", "transformers", "peft", "optuna"),
    *("ray", "submitit", "tensorboard", "wandb", "trackio"),
)


def blocks(text, language):
    """(line, code) of every fenced block of a language."""
    for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S):
        yield text[: found.start()].count("\n") + 2, found[1]


def between(text, marker):
    """What stands between `<!-- marker -->` and `<!-- /marker -->`."""
    found = re.findall(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", text, re.S)
    assert len(found) == 1, f"{len(found)} passages are marked {marker}"
    return found[0].strip()


def read(path):
    return (ROOT / path).read_text()


# ---------------------------------------------------------------------------------------------------- code in documents
@pytest.mark.usefixtures("quick_jax")
@pytest.mark.parametrize("path", [p for p in DOCUMENTS if list(blocks(p.read_text(), "python"))], ids=short_name)
def test_python_blocks_run_in_order(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extensions, "_ADDED", {sort: {} for sort in extensions.GROUPS})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.path_importer_cache, ".", raising=False)  # the folder of an earlier page
    torch.manual_seed(0)
    namespace = {"__name__": "__document__"}
    for line, code in blocks(path.read_text(), "python"):
        try:
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
        except ModuleNotFoundError as error:  # from here on: a block builds on those before it
            if error.name not in EXTRAS:
                raise
            pytest.skip(f"{short_name(path)}, line {line}: {error.name} is not installed")


def test_the_example_runs_replaces_every_layer_and_keeps_the_meaning_of_the_mask():
    example = runpy.run_path(str(ROOT / "examples" / "swap_heads.py"))
    change, losses = example["main"](steps=40)
    assert change < 1e-5
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    model = example["Reader"](5).eval()
    x, padding = torch.randn(2, 6, 5), torch.zeros(2, 6, dtype=torch.bool)
    padding[:, :2] = True
    old, blind = model(x, padding), model(x)
    assert (old - blind).abs().max() > 1e-3
    assert example["replace"](model, [ph.Softmax(4)]) == 2
    assert not [m for m in model.modules() if isinstance(m, torch.nn.MultiheadAttention)]
    torch.testing.assert_close(model(x, padding), old)


def test_the_example_of_selecting_and_relating():
    """The bound holds for each input, width helps, and selection is not enough."""
    example, dice = runpy.run_path(str(ROOT / "examples" / "select_then_relate.py")), torch.Generator()
    rows = example["construction"](dice.manual_seed(1), 1000)
    assert all(row["excess"] < 1e-12 for row in rows)
    errors = [row["error"] for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 < 0.1 < errors[1]
    narrow, wide = example["training"](dice.manual_seed(1), (4, 64), 400)
    assert wide["error"] < 0.7 * narrow["error"]
    alone = example["contrast"](dice.manual_seed(1), 100)
    assert wide["error"] < 0.8 * alone["softmax"]


# ------------------------------------------------------------------------------------------------------------- commands
def shell_lines(text):
    for _, code in blocks(text, "bash"):
        for line in code.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def verb_examples():
    """The examples in the help of the command line."""
    for verb in cli.VERBS.values():
        for example in re.findall(r"^  (polyhead .*)", inspect.getdoc(verb), re.M):
            yield shlex.split(example.partition(" > ")[0], comments=True)


def one_of_each(runs, text):
    """Of a study's hundred runs those that differ in what fields they have: each is parsed, which takes its time."""
    return list(
        {(type(run.task), type(run.model), *map(type, getattr(run.model, "heads", ()))): run for run in runs}.values()
    ), text


def divided(runs, devices):
    """The exit code 0 if every batch can be divided among the devices, as training needs it; else 2."""
    return 2 if any(run.train.batch_size % (devices * run.train.accumulate) for run in runs) else 0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files that commands read."""
    place = tmp_path_factory.mktemp("commands")
    config.save(ph.recipes.RECIPES["fuzzy-hyla"](), place / "mine.yaml")
    return place


@pytest.fixture
def dry(monkeypatch, files):
    """A command line that parses and checks what it is given, and then does nothing."""
    monkeypatch.chdir(files)
    resolve = cli_runs.resolve
    monkeypatch.setattr(cli_runs, "resolve", lambda *named: one_of_each(*resolve(*named)))
    monkeypatch.setattr(cli_runs, "train_runs", lambda runs, devices=1, **_: divided(runs, devices))
    monkeypatch.setattr(cli_sweep, "train_side_by_side", lambda *_, **__: [])
    for name, verb in cli.VERBS.items():
        if name not in ("train", "sweep"):  # those read their arguments when they are called
            monkeypatch.setitem(cli.VERBS, name, functools.wraps(verb)(lambda *_, **__: 0))
    return lambda words: cli.main(words[1:])


COMMANDS = [words for path in DOCUMENTS for words in shell_lines(path.read_text()) if words[0] == "polyhead"]


@pytest.mark.parametrize("words", dict.fromkeys(map(tuple, [*COMMANDS, *verb_examples()])), ids=" ".join)
def test_commands_parse(words, dry):
    assert words[0] == "polyhead"
    assert dry(words) == 0


def test_a_command_that_does_not_exist_is_noticed(dry, capsys):
    assert dry(["polyhead", "train", "fuzzy-hyla", "--train.rate", "1"]) == 2
    assert dry(["polyhead", "eval", "runs/a", "--split", "novel"]) == 2
    explanation = capsys.readouterr().err
    assert "--train.rate" in explanation
    assert "--split" in explanation


# --------------------------------------------------------------------------------------------------- links and pictures
def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=short_name)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), f"{short_name(path)}: {target}"
        if anchor:
            assert anchor in {slug(h) for h in re.findall(r"^#+ (.*)", there.read_text(), re.M)}, target


def test_every_page_is_in_the_menu_of_the_site():
    listed = set()
    for path in PAGES:
        for body in re.findall(r"^```{toctree}\n(.*?)^```", path.read_text(), re.M | re.S):
            entries = [line.strip() for line in body.splitlines() if line.strip() and not line.startswith(":")]
            names = [re.sub(r".*<(.+)>", r"\1", entry) for entry in entries]
            listed |= {(path.parent / f"{name}.md").resolve() for name in names}
    assert set(PAGES) - listed == {ROOT / "docs" / "index.md"}
    assert {page.with_suffix(".py") for page in listed - set(PAGES)} <= set((ROOT / "docs").glob("tutorial*.py"))


# -------------------------------------------------------------------------------------------------------- what they say
