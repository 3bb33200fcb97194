"""How dense the source is: counts in each room stay below limits that may only go down.

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
    "analysis": (35, 27, 0, 0),
    "cli": (39, 8, 0, 1),
    "compat": (68, 44, 0, 0),
    "config": (28, 15, 0, 1),
    "jaxside": (7, 10, 0, 0),
    "layers": (51, 22, 0, 3),
    "models": (27, 8, 0, 0),
    "ops": (62, 64, 0, 1),
    "pages": (31, 9, 0, 0),
    "papers": (115, 62, 0, 0),
    "scale": (30, 1, 0, 0),
    "spec": (9, 0, 0, 0),
    "tasks": (60, 21, 0, 2),
    "train": (38, 35, 0, 2),
}
"""Room -> counts, in the order of COUNTED.  They may only go down."""

MAX_RATES = {"comprehensions": 18, "conditionals": 12, "walruses": 0.2, "vague names": 1}
MAX_ROOM = 25
"""For each thousand lines: the most of the package, and the most comprehensions of a room."""

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


def per_thousand_lines(total):
    return {name: 1000 * count / max(1, total["lines"]) for name, count in total.items()}


def of_room(room):
    return counts(sorted((PACKAGE / room).rglob("*.py")))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_no_denser_than_its_limits(room):
    total = of_room(room)
    limits = dict(zip(COUNTED, LIMITS[room], strict=True))
    assert not {name: total[name] for name, limit in limits.items() if total[name] > limit}
    assert per_thousand_lines(total)["comprehensions"] <= MAX_ROOM


def test_the_package_is_plain_and_has_comments():
    rates = per_thousand_lines(counts(sorted(PACKAGE.rglob("*.py"))))
    assert not {name: rates[name] for name, limit in MAX_RATES.items() if rates[name] > limit}
    assert rates["comments"] >= MIN_COMMENTS


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
        rates = per_thousand_lines(of_room(name))
        print(f"{name:<12}", *(f"{rates[key]:>16.1f}" for key in (*COUNTED, "comments")))
