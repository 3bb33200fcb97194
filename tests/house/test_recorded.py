"""Facts that must be recorded: the timing behind every choice of "auto"; the API page of every public name."""

import ast
import importlib
import inspect
import re

import pytest
from scripts import ROOT

from polyhead.ops.dispatch import BACKENDS, IN_OP_FILE

OPS = ROOT / "src" / "polyhead" / "ops"

UNTIMED = {("hyla", "triton"), ("linear", "triton"), ("relational", "triton")}
"""Impls that "auto" chooses on a GPU although none was timed there, as their docstrings say.  This may only shrink."""


def why(source):
    """What `preferred` of an impl says of itself."""
    tree = ast.parse(source)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "preferred"]
    return "" if not found else " ".join((ast.get_docstring(found[0]) or "").split())


def timed(words):
    """Whether they hold a measured ratio or time, and what it was measured on."""
    figures = re.findall(r"\d\.\d|\d+ ms", words)
    return len(figures) >= 2 and re.search(r"\bone core\b|\bH200\b", words) is not None


@pytest.mark.parametrize(
    ("op", "impl"), [(op, impl) for op, impls in BACKENDS.items() for impl in impls if impl not in IN_OP_FILE]
)
def test_a_choice_of_auto_has_a_recorded_timing(op, impl):
    places = OPS / op / f"{impl}.py", OPS / op / impl / "__init__.py", OPS / "tiling.py"  # of any op, by its reference
    words = why(next(path for path in places if path.exists()).read_text())
    assert timed(words) == ((op, impl) not in UNTIMED), f"{op} {impl}: {words or 'no `preferred`'}"
    if (op, impl) in UNTIMED:
        assert re.search(r"[Nn]ot (been )?timed yet", words), words


@pytest.mark.parametrize(
    "words", ["", "Is it faster?  It is.", "1.1 and 1.4 of something", "It takes 3 ms on one core of my machine."]
)
def test_a_choice_without_a_timing_is_noticed(words):
    assert not timed(why(f'def preferred(x):\n    """{words}"""' if words else "def other(x): ..."))


# --------------------------------------------------------------------------------------------------------- public names
PUBLIC = ("", ".ops", ".analysis", ".tasks", ".train", ".scale.plan", ".scale.sweep", ".scale.tune")
FROM_SOURCE = ("jaxside", "jaxside.nnx")
"""Doors whose names are read from the file: packages that they need may not be installed."""


def public():
    """The dotted names of all but modules and tuples that the doors of the package offer."""
    for door in PUBLIC:
        module = importlib.import_module(f"polyhead{door}")
        found = {name: getattr(module, name) for name in module.__all__}
        yield from (
            f"polyhead{door}.{n}" for n, x in found.items() if not (inspect.ismodule(x) or isinstance(x, tuple))
        )
    for door in FROM_SOURCE:
        tree = ast.parse((ROOT / "src" / "polyhead" / door.replace(".", "/") / "__init__.py").read_text())
        found = (n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
        yield from (f"polyhead.{door}.{name}" for name in ast.literal_eval(next(found).value))


def lost(names):
    """Those that no page of the API shows; the shorter name of a thing will do."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^\.\. auto\w+:: (\S+)", pages, re.M))
    return [name for name in names if not {name, f"polyhead.{name.rpartition('.')[2]}"} & shown]


def test_every_public_name_has_a_page():
    """What the pages show has a docstring: test_site.py."""
    names = list(public())
    assert len(names) > 100
    assert lost([*names, "polyhead.planted"]) == ["polyhead.planted"]
