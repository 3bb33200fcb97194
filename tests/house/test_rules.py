"""The rules of the source (docs/design.md): sizes, names and the order of imports."""

import ast
import functools
import pathlib

from scripts import PACKAGE, ROOT
from some import some

import house
import polyhead
from polyhead.ops.dispatch import BACKENDS

FILES = some(sorted(PACKAGE.rglob("*.py")))
PLACES = ("src", "tests", "benchmarks", "examples", "docs")
EVERYTHING = [p for d in PLACES for p in sorted((ROOT / d).rglob("*.py")) if "_build" not in p.parts]

LADDER = {
    "spec": 0,
    "config": 1,
    "ops": 2,
    "layers": 3,
    **dict.fromkeys(("models", "tasks"), 4),
    "train": 5,
    **dict.fromkeys(("scale", "analysis", "compat", "jaxside"), 6),
    **dict.fromkeys(("pages",), 7),
    "papers": 8,
    **dict.fromkeys(("cli", "__main__"), 9),
}
SEES = {
    "ops": {"ops", "spec"},
    "tasks": {"tasks", "config", "spec"},
    "jaxside": {"jaxside", "config", "spec"},
}
"""Folders that see even less than the rungs below them."""

ONLY_IN = {
    "plotly": ("polyhead/pages",),
    "matplotlib": ("polyhead/analysis/canvas.py", "polyhead/analysis/figures.py"),
    "tyro": ("polyhead/cli",),
    "transformers": ("polyhead/compat/huggingface",),
}


HOME = {name: f"{module}.{attribute}" for name, (module, attribute) in polyhead._HOME.items()} | polyhead._MODULES


def nodes(path):
    return _nodes(path.read_text(), str(path))


@functools.cache
def _nodes(text, name):
    return house.nodes(ast.parse(text, filename=name))


def functions(path):
    return [n for n in nodes(path) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def imports(path):
    """(module, line) of every import, also inside functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [alias.name for alias in node.names]
            if node.module == "polyhead":  # a lazy name counts as the file it comes from
                yield from ((HOME.get(name, f"polyhead.{name}"), node.lineno) for name in names)
            else:
                yield node.module, node.lineno
                yield from ((f"{node.module}.{name}", node.lineno) for name in names)


def rung(module):
    """The rung of `polyhead.layers.attention` is that of "layers"; None for the package itself and outside it."""
    parts = module.split(".")
    if parts[0] != "polyhead" or len(parts) == 1:
        return None
    return LADDER.get(parts[1])


def module_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def too_long(path):
    if (lines := path.read_text().count("\n")) > 800:
        yield f"{path}: {lines} lines"


WRAPPERS = {("shapes.py", "checked"), ("precision.py", "lowered")}
WRAPPERS |= {("custom_op_rules.py", "fake"), ("custom_op_rules.py", "rule")}
"""Functions that take **options, because they stand in for functions of any signature."""


def violations(path):
    """Every broken rule of one file, in words."""
    where = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE.parent) else path.name
    yield from too_long(path)
    if path.name == "utils.py":
        yield f"{where}: no file is called utils"
    for module, line in imports(path):
        rooms = ONLY_IN.get(module.split(".")[0])
        if rooms and not str(where).startswith(rooms):
            yield f"{where}:{line}: {module} stays in {', '.join(rooms)}"
    for node in nodes(path):
        bases = [ast.unparse(b) for b in node.bases] if isinstance(node, ast.ClassDef) else []
        if "nn.Module" in bases and len(bases) > 1:
            yield f"{where}:{node.lineno}: {node.name} inherits from {len(bases)} classes"
    for f in functions(path):
        yield from _function_violations(where, f)


def _function_violations(where, f):
    length = f.end_lineno - f.lineno + 1
    if length > 80:
        yield f"{where}:{f.lineno}: {f.name} has {length} lines"
    a = f.args
    names = [arg.arg for arg in a.posonlyargs + a.args]
    positional = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))
    if positional > 6:
        yield f"{where}:{f.lineno}: {f.name} has {positional} positional arguments"
    if positional + len(a.kwonlyargs) > 15:
        yield f"{where}:{f.lineno}: {f.name} has {positional + len(a.kwonlyargs)} arguments"
    wrapper = (pathlib.Path(where).name, f.name) in WRAPPERS
    allowed = "compat" in str(where) or wrapper
    if a.kwarg is not None and not allowed:
        yield f"{where}:{f.lineno}: {f.name} takes **{a.kwarg.arg}"


def ladder_violations(path, module=None):
    mine = module or module_of(path)
    own = rung(mine)
    if own is None:
        yield from [] if mine == "polyhead" else [f"{mine} has no rung"]
        return
    for name, line in imports(path):
        theirs = rung(name)
        if name == "polyhead" and own < LADDER["cli"]:
            yield f"{mine}:{line}: {mine} may not import the whole package"
        here, there = mine.split(".")[1], name.partition(".")[2].partition(".")[0]
        if theirs is not None and (theirs > own or there not in SEES.get(here, {there})):
            yield f"{mine}:{line}: {here} may not import {there}"
        if theirs == own and _sideways(mine, name):
            yield f"{mine}:{line}: {mine} may not import {name}"


def _sideways(mine, theirs):
    """tasks know no network; an implementation of an op knows neither another one nor the reference."""
    a, b = mine.split("."), theirs.split(".")
    if {a[1], b[1]} == {"models", "tasks"}:
        return True
    if a[1] == b[1] == "ops" and len(a) == 4 and a[2] in BACKENDS and a[3] not in ("reference", "__init__"):
        if len(b) == 2 or (b[2] in BACKENDS and b[2] != a[2]):
            return True
        return len(b) > 3 and b[2] == a[2] and b[3].split("_")[0] not in (a[3].split("_")[0], "tiles")
    return False


def test_files_keep_the_rules_and_others_are_short_too():
    assert not [broken for path in FILES for broken in (*violations(path), *ladder_violations(path))]
    assert not [broken for path in some(set(EVERYTHING) - set(FILES)) for broken in too_long(path)]


"""These may only go down: lower a number when yours is lower."""


def strangers(trees):
    """Files beyond tasks/ and papers/ that name a concrete task."""
    named = [f"{file}:{lines[0]}" for by in house.known_tasks(trees).values() for file, lines in by.items()]
    return [where for where in named if not where.startswith(("polyhead.tasks", "polyhead.papers"))]


KNOWING = """from polyhead.tasks.sraven.task import RULES
from polyhead.tasks.sraven import ambiguity
from polyhead.tasks import Sraven
fits = isinstance(x, ph.tasks.Sraven)
WORDS = {'sraven': 'rule'}
kind = type(task).__name__ == 'Sraven'
import polyhead.tasks.sraven.task
from polyhead.tasks.text import tokens, task
importlib.import_module('polyhead.tasks.sraven.task')
fits = isinstance(x, t.Sraven)
minutes = {'sraven-hyla': 3}"""


def test_no_task_is_known_beyond_its_folder_and_the_papers():
    trees = house.files(PACKAGE)
    assert len(house.tasks(trees)) >= 9
    assert not strangers(trees)
    few = {name: tree for name, tree in trees.items() if name.startswith("polyhead.tasks")}
    for line in KNOWING.splitlines():
        assert strangers(few | {"polyhead.scale.planted": ast.parse(line)}) == ["polyhead.scale.planted:1"], line


def test_a_figure_is_known_in_its_file_alone():
    trees = house.files(PACKAGE)
    assert len(house.figures(trees)) >= 37
    assert not house.known_figures(trees)
    planted = trees | {"polyhead.papers.study": ast.parse("x = 1\nif figure == 'fig-6': ...")}
    assert house.known_figures(planted) == {"fig-6": ["polyhead.papers.study:2"]}


def test_the_rules_catch_planted_faults(tmp_path):
    bad = tmp_path / "code.py"
    many = ", ".join(f"a{i}" for i in range(7))
    bad.write_text(f"import polyhead.layers.heads.groups\ndef f({many}, **rest):\n" + "    x = 1\n" * 81)
    found = "\n".join([*violations(bad), *ladder_violations(bad, "polyhead.ops.latent_code")])
    for fault in ("ops may not import layers", "7 positional", "takes **rest", "has 82 lines"):
        assert fault in found
    bad.write_text("from tyro import conf\nclass Two(nn.Module, dict): ...\n")
    assert list(violations(bad)) == [
        "code.py:1: tyro stays in polyhead/cli",
        "code.py:1: tyro.conf stays in polyhead/cli",
        "code.py:2: Two inherits from 2 classes",
    ]
    bad.write_text("\n" * 801)
    assert [line.rpartition(": ")[2] for line in violations(bad)] == ["801 lines"]
    assert list(ladder_violations(bad, "polyhead.attic.trunk")) == ["polyhead.attic.trunk has no rung"]
    for fault, where in (
        ("from polyhead.models import transformer", "tasks.fuzzy_logic.task"),
        ("from polyhead.tasks import FuzzyLogic", "models.transformer"),
        ("from polyhead.ops.latent_code import act", "tasks.fuzzy_logic.task"),
        ("from polyhead import config", "ops.latent_code"),
        ("from polyhead import Transformer", "layers.attention"),
        ("from polyhead.ops import hyla", "ops.hyla.blocked"),
        ("from polyhead.ops.linear.chunked import forward", "ops.hyla.blocked"),
        ("from polyhead.ops.hyla.reference import reference", "ops.hyla.blocked"),
        ("from polyhead.ops.hyla.triton import forward", "ops.hyla.blocked"),
        ("import polyhead as ph", "analysis.probe"),
        ("from polyhead.train import run", "config.components"),
        ("from polyhead.ops import hyla", "jaxside.ops"),
    ):
        bad.write_text(fault + "\n")
        assert "may not" in "".join(ladder_violations(bad, f"polyhead.{where}")), (fault, where)


def test_nothing_speaks_of_the_place_it_was_made_in():
    place = str(ROOT)
    for path in some(ROOT.rglob("*.*")):
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".txt") and ".venv" not in path.parts:
            text = path.read_text()
            assert place not in text, path
