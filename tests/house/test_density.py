"""How dense the source is: counts for each thousand lines of a room stay below limits that may only go down.

python tests/house/test_density.py     # the table of all rooms
"""

import ast
import io
import pathlib
import tokenize

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "src" / "polyhead"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")

VAGUE = frozenset(
    (
        *("found", "own", "made", "given", "came", "told", "said", "shown", "mine", "look", "each", "those", "wanted"),
        *("asked", "kept", "held", "seen", "theirs", "ours", "alone", "what", "who", "where", "way", "many", "most"),
        *("least", "few", "some", "one", "more", "rest", "done", "begun", "began", "knows", "taken", "took", "went"),
        *("gone", "lost", "early", "late", "ready", "among", "beside", "else", "whole", "thing", "things", "place"),
        *("places", "how", "why", "which"),
    )
)
"""Words that say nothing about a value, as names of locals and arguments."""

COUNTED = ("comprehensions", "conditionals", "walruses", "vague names")
LIMITS = {
    "analysis": (15.4, 11.9, 0.1, 0.1),
    "cli": (20.8, 4.4, 0.1, 0.6),
    "compat": (16.5, 11.9, 0.1, 0.1),
    "config": (15.3, 7.7, 0.1, 0.6),
    "jaxside": (5.3, 7.5, 0.1, 0.1),
    "layers": (13.6, 7.0, 0.1, 0.9),
    "models": (12.3, 3.6, 0.1, 0.1),
    "ops": (10.4, 10.8, 0.1, 0.3),
    "pages": (15.9, 4.7, 0.1, 0.1),
    "papers": (17.8, 9.7, 0.1, 0.1),
    "scale": (20.8, 0.7, 0.1, 0.1),
    "spec": (13.5, 0.1, 0.1, 0.1),
    "tasks": (14.0, 4.5, 0.1, 0.5),
    "train": (12.4, 10.9, 0.1, 0.7),
}
"""Room -> counts for each thousand lines, in the order of COUNTED.  They may only go down; wanted: 18, 12, 0.2, 1."""

MAX_FUNCTION, MAX_FILE = 80, 800
"""Lines."""

MIN_COMMENTS = 32
"""Of the package, for each thousand lines."""


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def bound_names(function):
    """Names of the arguments and of everything that the function assigns."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def counts(paths):
    """Counts of a set of files; "lines" and "comments" among them."""
    total = dict.fromkeys((*COUNTED, "lines", "comments"), 0)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        total["lines"] += text.count("\n")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            total["comments"] += token.type == tokenize.COMMENT
        tree = ast.parse(text)
        for node in ast.walk(tree):
            total["conditionals"] += isinstance(node, ast.IfExp)
            total["walruses"] += isinstance(node, ast.NamedExpr)
            total["comprehensions"] += isinstance(node, (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp))
        for function in functions(tree):
            total["vague names"] += len(bound_names(function) & VAGUE)
    return total


def per_thousand_lines(room):
    total = counts(sorted((PACKAGE / room).rglob("*.py")))
    lines = max(1, total.pop("lines"))
    return {name: 1000 * count / lines for name, count in total.items()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_no_denser_than_its_limits(room):
    measured = per_thousand_lines(room)
    limits = dict(zip(COUNTED, LIMITS[room], strict=True))
    above = {name: round(measured[name], 1) for name, limit in limits.items() if measured[name] > limit}
    assert not above


def test_the_package_has_comments():
    total = counts(sorted(PACKAGE.rglob("*.py")))
    assert 1000 * total["comments"] / total["lines"] >= MIN_COMMENTS


def test_a_planted_dense_function_is_counted(tmp_path):
    dense = tmp_path / "dense.py"
    dense.write_text("def f(x):\n    found = [y if y else 0 for y in x]\n    return found if (n := len(x)) else n\n")
    total = counts([dense])
    assert [total[name] for name in COUNTED] == [1, 2, 1, 1]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_about_one_subject_and_a_function_as_long_as_its_thought(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions(ast.parse(text))}
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION}


if __name__ == "__main__":
    print(f"{'room':<12}", *(f"{name:>16}" for name in (*COUNTED, "comments")))
    for name in ROOMS:
        row = per_thousand_lines(name)
        print(f"{name:<12}", *(f"{row[key]:>16.1f}" for key in (*COUNTED, "comments")))
