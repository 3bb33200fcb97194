"""How dense the source is: counts for each thousand lines stay below limits that may only go down."""

import ast
import io
import tokenize

import pytest
from scripts import PACKAGE, ROOT

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
MAX_RATES = {"comprehensions": 13, "conditionals": 7.5, "walruses": 0, "vague names": 0.3}
MAX_ROOM = 21
"""For each thousand lines: the most of the package, and the most comprehensions of a room.  They may only go down."""

MAX_FUNCTION, MAX_FILE = 80, 800
"""Lines."""

MAX_LINES = {"src": 40_000, "tests": 24_000, "benchmarks": 1_800}
"""Of a folder's files in the languages of SUFFIXES."""

SUFFIXES = (".py", ".cpp", ".h", ".html", ".css", ".js")

MIN_COMMENTS = 42
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
def test_a_room_has_few_comprehensions(room):
    assert per_thousand_lines(of_room(room))["comprehensions"] <= MAX_ROOM


def test_the_package_is_plain_and_has_comments():
    rates = per_thousand_lines(counts(sorted(PACKAGE.rglob("*.py"))))
    assert not {name: rates[name] for name, limit in MAX_RATES.items() if rates[name] > limit}
    assert rates["comments"] >= MIN_COMMENTS


def test_no_comprehension_lies_in_another():
    comprehensions = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, comprehensions):
                inner = [part for part in ast.walk(node) if isinstance(part, comprehensions)]
                assert inner == [node], f"{path}:{node.lineno}"


def test_files_are_about_one_subject_and_functions_as_long_as_their_thought():
    long = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MAX_FILE:
            long[path.name] = text.count("\n")
        for node in functions(ast.parse(text)):
            if node.end_lineno - node.lineno >= MAX_FUNCTION:
                long[f"{path.name}:{node.name}"] = node.end_lineno - node.lineno + 1
    assert not long


@pytest.mark.parametrize("folder", MAX_LINES)
def test_the_house_stays_small(folder):
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in paths) <= MAX_LINES[folder]
