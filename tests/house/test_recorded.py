"""Facts that must be recorded: the timing behind every choice of "auto"; the type and API page of every public name."""

import ast
import importlib
import inspect
import pathlib
import re
import typing

import pytest

from polyhead.ops.dispatch import BACKENDS, IN_OP_FILE

ROOT = pathlib.Path(__file__).parents[2]
OPS = ROOT / "src" / "polyhead" / "ops"

UNTIMED = {("hyla", "triton"), ("linear", "triton"), ("relational", "triton")}
"""Impls that "auto" chooses on a GPU although none was timed there, as their docstrings say.  This may only shrink."""


def candidates():
    return [(op, impl) for op, impls in BACKENDS.items() for impl in impls if impl not in IN_OP_FILE]


def why(source):
    """What `preferred` of an impl says of itself."""
    tree = ast.parse(source)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "preferred"]
    return "" if not found else " ".join((ast.get_docstring(found[0]) or "").split())


def timed(words):
    """Whether they hold a measured ratio or time, and what it was measured on."""
    figures = re.findall(r"\d\.\d|\d+ ms", words)
    return len(figures) >= 2 and re.search(r"\bone core\b|\bH200\b", words) is not None


def source_of(op, impl):
    places = [
        OPS / op / f"{impl}.py",
        OPS / op / impl / "__init__.py",
        OPS / "tiling.py",
    ]  # of any op, by its reference
    return next(path for path in places if path.exists()).read_text()


@pytest.mark.parametrize(("op", "impl"), candidates())
def test_a_choice_of_auto_has_a_recorded_timing(op, impl):
    words = why(source_of(op, impl))
    assert timed(words) == ((op, impl) not in UNTIMED), f"{op} {impl}: {words or 'no `preferred`'}"
    if (op, impl) in UNTIMED:
        assert re.search(r"[Nn]ot (been )?timed yet", words), words


@pytest.mark.parametrize(
    "words", ["", "Is it faster?  It is.", "1.1 and 1.4 of something", "It takes 3 ms on one core of my machine."]
)
def test_a_choice_without_a_timing_is_noticed(words):
    assert not timed(why(f'def preferred(x):\n    """{words}"""' if words else "def other(x): ..."))


# --------------------------------------------------------------------------------------------------------- public names
PUBLIC = ("", ".ops", ".analysis", ".tasks", ".train")


def public():
    """(dotted name, what it is) of all that the doors of the package offer."""
    for door in PUBLIC:
        module = importlib.import_module(f"polyhead{door}")
        for name in module.__all__:
            if not inspect.ismodule(found := getattr(module, name)):
                yield f"polyhead{door}.{name}", found


def untyped(function):
    """The parameters of a function, and "return", that have no type."""
    named = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    types = inspect.get_annotations(inspect.unwrap(function))
    return [p.name for p in named if p.name not in types] + ["return"] * ("return" not in types)


def functions(found):
    """A function itself, or the public methods that a class defines."""
    if inspect.isfunction(found):
        return [found]
    own = vars(found).items() if inspect.isclass(found) and not typing.get_origin(found) else ()
    return [value for name, value in own if inspect.isfunction(value) and not name.startswith("_")]


def test_every_public_name_has_types():
    names = dict(public())
    assert len(names) > 60
    bare = {
        f"{name}.{f.__name__}": lacking
        for name, one in names.items()
        for f in functions(one)
        if (lacking := untyped(f))
    }
    assert not bare


def test_a_name_without_types_is_noticed():
    def bare(x: int, y=3):
        return x + y

    assert untyped(bare) == ["y", "return"]
    assert functions(type("Bare", (), {"method": bare, "_hidden": bare})) == [bare]


def test_every_public_name_has_a_docstring_and_a_place():
    names = dict(public())
    names |= {f"polyhead.{part}.{name}": None for part in ("jaxside", "jaxside.nnx") for name in listed(part)}
    assert unfinished(names, api()) == ([], [])


def listed(module):
    """The names in `__all__`, read from the file: packages that it needs may not be installed."""
    tree = ast.parse((ROOT / "src" / "polyhead" / module.replace(".", "/") / "__init__.py").read_text())
    found = (n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    return ast.literal_eval(next(found).value)


def api():
    return "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))


def unfinished(names, pages):
    """Names without a docstring, and those that no page of the API shows; the shorter name of a thing will do."""
    shown = set(re.findall(r"^\.\. auto\w+:: (\S+)", pages, re.M))
    silent = [name for name, one in names.items() if callable(one) and not inspect.getdoc(one)]
    short = {name: f"polyhead.{name.rpartition('.')[2]}" for name in names}
    lost = [name for name, one in names.items() if not isinstance(one, tuple) and not {name, short[name]} & shown]
    return silent, lost


def test_a_name_without_docstring_and_place_is_noticed():
    def silent(): ...

    assert unfinished({"polyhead.silent": silent}, api()) == (["polyhead.silent"], ["polyhead.silent"])
