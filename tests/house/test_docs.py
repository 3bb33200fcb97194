"""The documents are correct: code runs, commands parse, links resolve, tables are complete."""

import inspect
import json
import pathlib
import re
import runpy
import shlex
import sys

import pytest
import torch
import yaml
from scripts import DOCUMENTS, PACKAGE, PAGES, ROOT, loaded, short_name
from some import some

import polyhead as ph
from polyhead import config, spec
from polyhead.cli import dispatch as cli, plan as cli_plan, sweep as cli_sweep, train as cli_runs, tune as cli_tune
from polyhead.config import extensions
from polyhead.ops.dispatch import BACKENDS
from polyhead.spec import shapes
from polyhead.tasks.fuzzy_logic.floors import FLOORS

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
    """The `>>> polyhead ...` lines in the help of the command line."""
    for verb in cli.VERBS.values():
        yield from (shlex.split(found) for found in re.findall(r">>> (.*)", inspect.getdoc(verb.load())))


def one_of_each(runs, text):
    """Of a study's hundred runs those that differ in what fields they have: each is parsed, which takes its time."""
    return list(
        {(type(run.task), type(run.model), *map(type, getattr(run.model, "heads", ()))): run for run in runs}.values()
    ), text


def divided(runs, devices):
    """The exit code 0 if every batch can be divided among the devices, as training and plans want it; else 2."""
    return 2 if any(run.train.batch_size % (devices * run.train.accumulate) for run in runs) else 0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files that commands read."""
    place = tmp_path_factory.mktemp("commands")
    config.save(ph.recipes.RECIPES["demo"]()[0], place / "mine.yaml")
    grid = "recipe: fuzzy-hyla\nparameters: {seed: {values: [0, 1]}, train.lr: {values: [1e-3, 3e-3]}}\n"
    (place / "grid.yaml").write_text(grid)
    return place


@pytest.fixture
def dry(monkeypatch, files):
    """A command line that parses and checks what it is given, and then does nothing."""
    monkeypatch.chdir(files)
    resolve = cli_runs._resolve
    monkeypatch.setattr(cli_runs, "_resolve", lambda *named: one_of_each(*resolve(*named)))
    monkeypatch.setattr(cli_runs, "train", lambda runs, devices=1, **_: divided(runs, devices))
    monkeypatch.setattr(cli_sweep, "side_by_side", lambda *_, **__: [])
    monkeypatch.setattr(cli_plan, "answer", lambda runs, asked: divided(runs, asked.devices))
    monkeypatch.setattr(cli_tune, "answer", lambda *_: 0)
    for name, verb in cli.VERBS.items():
        if name not in ("train", "sweep", "tune", "plan"):  # those read their arguments when they are called
            monkeypatch.setattr(verb.load(), "__call__", lambda self: 0)
    return lambda words: cli.main(words[1:])


COMMANDS = [words for path in DOCUMENTS for words in shell_lines(path.read_text()) if words[0] == "polyhead"]


@pytest.mark.parametrize("words", dict.fromkeys(map(tuple, [*COMMANDS, *verb_examples()])), ids=" ".join)
def test_commands_parse(words, dry):
    assert words[0] == "polyhead"
    assert dry(words) == 0


def test_a_command_that_does_not_exist_is_noticed(dry, capsys):
    assert dry(["polyhead", "train", "fuzzy-hyla", "--train.rate", "1"]) == 2
    assert dry(["polyhead", "eval", "runs/a", "--split", "novel"]) == 2
    assert dry(["polyhead", "plan", "lm-hyla", "--devices", "64", "--card", "h100"]) == 2  # eight sequences
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_every_verb_is_shown():
    shown = {words[1] for words in COMMANDS} | {"demo"}
    assert shown == set(cli.VERBS)
    planned = re.search(r"^polyhead (.*)$", read("docs/conventions.md"), re.M)[1]
    assert planned.split(" | ") == list(cli.VERBS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=short_name)
def test_make_targets_and_programs_exist(path):
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.M))
    text = path.read_text()
    for words in shell_lines(text):
        if words[0].startswith(".venv/bin/"):
            assert (pathlib.Path(sys.executable).parent / pathlib.Path(words[0]).name).exists(), words[0]
        else:
            assert words[0] in ("make", "polyhead", "pip", "git", "torchrun"), words
        for word in words:
            if word.startswith(("tests/", "benchmarks/", "examples/", "docs/")):
                assert (ROOT / word).exists() or word in MADE, word
    asked = {words[1] for words in shell_lines(text) if words[0] == "make"} | set(re.findall(r"`make (\w+)`", text))
    assert asked <= targets


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


def test_the_numbers_of_the_readme_are_the_demos():
    """As `examples/readme_results.py` writes them, of the runs that the demo has now."""
    script = loaded("examples", "readme_results.py")
    kept = json.loads(script.KEPT.read_text(encoding="utf-8"))
    for marker, passage in script.PASSAGES.items():
        assert between(read("README.md"), marker) == passage(kept)
    assert {part: [config.digest(run) for run in runs()] for part, runs in script.PARTS.items()} == {
        part: kept[part]["digests"] for part in script.PARTS
    }
    assert kept["fuzzy"]["steps"] == script.PARTS["fuzzy"]()[0].train.steps
    assert ph.recipes.MINUTES["demo"] == round(script.minutes(kept), 1)


@pytest.mark.parametrize(
    ("hyla", "softmax", "unseen", "known", "against"),
    [
        ((0.7, 0.6), (0.8, 0.59), "the two are level", "though softmax is ahead", "neither shows composition yet"),
        ((0.7, 0.6), (0.8, 0.9), "softmax is ahead", "and softmax is ahead", "HYLA shows no composition yet"),
        ((0.8, 0.93), (0.8, 0.9), "HYLA is ahead", "though the two are level", "both reach it"),
    ],
)
def test_the_readme_says_what_the_numbers_say(hyla, softmax, unseen, known, against):
    script = loaded("examples", "readme_results.py")
    kept = json.loads(script.KEPT.read_text(encoding="utf-8"))
    scores = {"HYLA": hyla, "Softmax": softmax, "Mixture": (0.99, 0.91)}
    part = kept["fuzzy"] | {"head": ["", "iid", "compositional"], "steps": 15_000}
    part["rows"] = [[name, *(f"{x:.3f}\u00a0±\u00a00.008" for x in pair)] for name, pair in scores.items()]
    words, far = (" ".join(tell(kept | {"fuzzy": part}).split()) for tell in (script.says, script.limits))
    for name, scores, more in (("softmax is", softmax, " on known combinations;"), ("HYLA", hyla, ".")):
        assert f"of {name} {scores[1]:.3f}, against {scores[0]:.3f}{more}" in words
    assert f"After 15,000 steps {unseen} on unseen combinations, {known} on known ones." in words
    assert f"adds up training functions has 0.910, so {against}." in words
    assert "heads of width 2 as in HYLA's paper and 30 % of its training" in far


def test_the_readme_says_what_full_training_reaches(monkeypatch, tmp_path):
    script = loaded("examples", "readme_results.py")
    cards = {"fuzzy-hyla-1": 0.9, "fuzzy-hyla-2": 0.8, "fuzzy-softmax-1": 0.7, "fuzzy-softmax-2": 0.5}
    models = {name: {"scores": {"compositional": [score, 0.01]}} for name, score in cards.items()}
    monkeypatch.setattr(script.demo, "full", lambda: tuple(cards))
    monkeypatch.setattr(script.shipped, "models", lambda: models)
    long = tmp_path / "results.json"
    long.write_text(json.dumps({"numbers": {"Mixture": {"unseen": {"1": 0.85, "2": 0.82, "3": 0.1}}}}), "utf-8")
    monkeypatch.setattr(script, "LONG", long)
    assert (
        "HYLA has 0.850, softmax 0.600, that baseline 0.835 (means of 2 splits, HYLA above it in 1)." in script.full()
    )


def test_the_readme_is_written_by_one_command(tmp_path, monkeypatch):
    """Of other numbers: the passages, the minutes, what is kept, and the figure."""
    script = loaded("examples", "readme_results.py")
    kept = json.loads(script.KEPT.read_text(encoding="utf-8"))
    kept["fuzzy"] |= {"steps": 12_345, "seconds": 60 * 99 - kept["race"]["seconds"]}
    for place in ("README", "RECIPES", "KEPT"):
        copy = tmp_path / getattr(script, place).name
        copy.write_text(getattr(script, place).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(script, place, copy)
    drawn = []
    monkeypatch.setattr(script, "measured", lambda folder: kept)
    monkeypatch.setattr(script, "draw", lambda found, path: drawn.append((found, path)))
    monkeypatch.setattr(sys, "argv", ["readme_results.py", str(tmp_path)])
    script.main()
    text = script.README.read_text(encoding="utf-8")
    assert [between(text, marker) for marker in script.PASSAGES] == [tell(kept) for tell in script.PASSAGES.values()]
    assert "After 12,345 steps" in text
    assert '"demo": 99.0,' in script.RECIPES.read_text(encoding="utf-8")
    assert json.loads(script.KEPT.read_text(encoding="utf-8")) == kept
    assert drawn == [(kept, ROOT / "docs" / "figures" / "demo.svg")]


# -------------------------------------------------------------------------------------------------------- what they say
def test_the_table_of_mechanisms_is_the_spec():
    """If this fails, the wanted table is in the message."""
    rows = [f"| `{m.config}` | `{m.equation}` | `ops.{m.op}` | {m.source} |" for m in spec.MECHANISMS]
    wanted = "\n".join(["| heads | output of the layer | function | source |", "|---|---|---|---|", *rows])
    assert between(read("README.md"), "mechanisms") == wanted, "\n" + wanted
    assert "|" not in "".join(m.equation + m.source for m in spec.MECHANISMS)


def test_the_layout_in_the_design_is_the_tree():
    told, folder = set(), "polyhead"
    for line in between(read("docs/design.md"), "layout").splitlines():
        if found := re.match(r"  ([\w/]+)/ ", line):
            folder = f"polyhead/{found[1]}"
        told |= {f"{folder}/{file}" for file in re.findall(r"\w+\.(?:py|css|js)\b", line)}
    there = {str(p.relative_to(PACKAGE.parent)) for p in PACKAGE.rglob("*") if p.suffix in (".py", ".css", ".js")}
    doors = {name for name in there if name.endswith(("/__init__.py", "/__main__.py"))}
    assert not (told | doors) ^ there
    families = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/ ", read("README.md"), re.M)) == families


def test_the_glossary_is_whole():
    text = read("docs/glossary.md")
    letters = dict(re.findall(r"^\| `(\w)` \| ([^,;|]*)", text, re.M))
    assert {letter: axis.strip() for letter, axis in letters.items()} == shapes.LETTERS
    names = {*spec.NORMALISE, *spec.ACTS, *FLOORS, "ceiling", "reference", "auto"}
    names |= {impl for impls in BACKENDS.values() for impl in impls} | {m.config for m in spec.MECHANISMS}
    names |= set(ph.tasks.FuzzyLogic().splits) | {"covered", "legacy", "partitionable", "interleaved", "half"}
    names |= {"code", "scores", "mask", "keep", "scored", "latents", "value_weight", "value_depth"}
    missing = {n for n in names if not re.search(rf"`{n}[`(]|^\| {n}\b|\| {n},", text, re.M)}
    assert not missing


def test_the_glossary_names_configurations_that_exist():
    found = re.findall(r"\| `((?:Softmax|Linear|Hyla)\(.*?\))` \|", read("docs/glossary.md"))
    assert len(found) == 11
    made = [eval(text, {"Softmax": ph.Softmax, "Linear": ph.Linear, "Hyla": ph.Hyla}) for text in found]
    assert len(set(made)) == len(made)


def test_documents_are_short_and_the_readme_begins_with_a_short_example():
    for path, lines in {"CONTRIBUTING.md": 60, "README.md": 220, "docs/design.md": 200}.items():
        assert len(read(path).splitlines()) <= lines
    first, *more = (code for _, code in blocks(read("README.md"), "python"))
    assert len(first.strip().splitlines()) <= 13
    assert len(more) >= 3


def test_the_changelog_knows_this_version():
    assert re.search(rf"^## \[{re.escape(ph.__version__)}\]", read("CHANGELOG.md"), re.M)
    assert f'version = "{ph.__version__}"' in read("pyproject.toml")


def test_hooks_are_local():
    for repo in some(yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]):
        assert repo["repo"] == "local"
        for hook in some(repo["hooks"]):
            assert hook["language"] == "system"
            assert (pathlib.Path(sys.executable).parent / pathlib.Path(hook["entry"].split()[0]).name).exists()
