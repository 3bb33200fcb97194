"""The source in numbers: `python tests/support/house.py [src/polyhead ...]`, for one or several trees.

files, lines        of Python in the package
at the root         modules in the package's top folder
folders             packages, without the root
longest chain       of imports between first-level folders; a circle counts as one
circles             of files that import each other, also inside functions and under TYPE_CHECKING
Any                 in annotations, aliases, casts and bounds, by whatever name it was imported
splats              calls with `*(a, b, ...)`, a literal tuple
** arguments        calls with `**values`, which type checkers cannot check
a new task          the files it touches, without papers/: its own, and all others that name a task
a new mechanism     the files that the patch of docs/howto/mechanism.md touches, tests included
a new figure        the files it touches: its own, all others that name a figure, and the one that lists the files

"-" is a number that cannot be counted: a tree without that patch, or without figures listed as `FIGURES` of `papers`.
"""

import ast
import functools
import pathlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set


@functools.cache
def files(package: pathlib.Path) -> dict[str, ast.Module]:
    """Dotted name -> its tree."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All of a file's; many rules ask for them."""
    return tuple(ast.walk(tree))


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """File -> the files of the package it imports anywhere."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for target in _targets(tree):
            while target not in trees and "." in target:
                target = target.rpartition(".")[0]
            if target != name and target in trees:
                arrows[name].add(target)
    return arrows


def _targets(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(word.value) for word in node.args if isinstance(word, ast.Constant))


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Nodes that all lead to each other; an arrow from a node to itself is none."""
    after = {node: _reached(arrows, node) for node in arrows}
    both = ([node, *(n for n in after[node] - {node} if node in after.get(n, ()))] for node in after)
    return sorted(map(list, {tuple(sorted(circle)) for circle in both if len(circle) > 1}))


def _reached(arrows: Mapping[str, set[str]], node: str) -> set[str]:
    found, waiting = set(), [node]
    while waiting:
        new = arrows.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def rooms(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same between folders (or files) of the first level."""
    between: dict[str, set[str]] = defaultdict(set)
    parts = {name: [other.split(".")[1] for other in others if "." in other] for name, others in arrows.items()}
    for name in parts:
        if "." in name:  # the package itself is the door to all of them
            between[name.split(".")[1]] |= {*parts[name]} - {name.split(".")[1]}
    return between


def chain(arrows: Mapping[str, set[str]]) -> int:
    """Nodes of the longest path; a circle counts as one."""
    one = {name: circle[0] for circle in circles(arrows) for name in circle}
    merged: dict[str, set[str]] = defaultdict(set)
    for name, others in arrows.items():
        mine = one.get(name, name)
        merged[mine] |= {one.get(other, other) for other in others} - {mine}

    @functools.cache
    def length(name: str) -> int:
        return 1 + max((length(other) for other in merged.get(name, ())), default=0)

    return max(map(length, [*merged]), default=0)


def anys(tree: ast.Module) -> int:
    """Where `Any` is used: in an annotation, a string too, or under a name of its own (`Row = dict[str, Any]`)."""
    renamed = (alias for node in nodes(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
    names = {"Any"} | {alias.asname for alias in renamed if alias.name == "Any" and alias.asname}
    return sum(_is_any(node, names) for node in nodes(tree))


def _is_any(node: ast.AST, names: Set[str]) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation, not prose
        return re.fullmatch(r"(.* \| )?([\w.]*\bAny|[\w.]+\[.*\bAny\b.*\])( \| .*)?", node.value) is not None
    return (isinstance(node, ast.Name) and node.id in names) or (isinstance(node, ast.Attribute) and node.attr == "Any")


def splats(tree: ast.Module) -> int:
    """`f(*(a, b))`."""
    calls = [argument for node in nodes(tree) if isinstance(node, ast.Call) for argument in node.args]
    return sum(isinstance(a, ast.Starred) and isinstance(a.value, (ast.Tuple, ast.List)) for a in calls)


def double_splats(tree: ast.Module) -> int:
    """`f(**values)`."""
    return sum(word.arg is None for node in nodes(tree) if isinstance(node, ast.Call) for word in node.keywords)


def figures(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """Name of a figure of a paper -> the file that makes it: the keys of its `FIGURES`."""
    found = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FIGURES" and ".papers." in module:
                keys = node.value.keys if isinstance(node.value, ast.Dict) else []
                found |= {str(key.value): module for key in keys if isinstance(key, ast.Constant)}
    return found


def known_figures(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Name of a figure -> `file:line` of what names it elsewhere.  Names of one ordinary word are left out."""
    owners = {name: module for name, module in figures(trees).items() if "-" in name}
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and owners.get(str(node.value), module) != module:
                found[str(node.value)].append(f"{module}:{node.lineno}")
    return found


CODECS = "tasks.text.tokens"
"""Tokenizers, which everything that reads or writes text may use: the one file of a task that others may know."""
ORDINARY = {"text", "images"}
"""Names of tasks that are ordinary words, which other strings may be."""
LIBRARIES = {"Text", "Images", "Maths", "maths"}
"""Words that other libraries and sentences have, too: alone in a string, or taken from `tasks`, they name a task."""


BASES = {"Task", "Classification"}
"""What tasks inherit from."""


def tasks(trees: Mapping[str, ast.Module]) -> dict[str, tuple[str, str]]:
    """Class of a task -> the name it gives itself, and the file or folder it lies in."""
    found = {}
    for module, tree in trees.items():
        for node in tree.body:
            bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
            if isinstance(node, ast.ClassDef) and bases & BASES and node.name not in BASES:
                fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and ast.unparse(f.target) == "name"]
                name = next((f.value.value for f in fields if isinstance(f.value, ast.Constant)), node.name)
                found[node.name] = (str(name), module.removesuffix(".task"))
    return found


def known_tasks(trees: Mapping[str, ast.Module]) -> dict[str, dict[str, list[int]]]:
    """Class of a task -> the files beyond its own that name it, with the lines: imports, its class, and its name or its
    class in strings (not in docstrings)."""
    known = tasks(trees)
    words = {word: kind for kind, (name, _) in known.items() for word in {kind, name} - ORDINARY}
    places = {place: kind for kind, (_, place) in known.items()}
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for module, tree in trees.items():
        prose = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
        for node in nodes(tree):
            for kind in _named(node, words, places) if id(node) not in prose else ():
                if not f"{module}.".startswith(f"{known[kind][1]}."):
                    found[kind][module].append(node.lineno)  # type: ignore[attr-defined]
    return found


def _named(node: ast.AST, words: Mapping[str, str], places: Mapping[str, str]) -> set[str]:
    """The classes of the tasks that a node names."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        whole = [each for alias in node.names if CODECS not in (each := of + alias.name)]
        inside = {kind for place, kind in places.items() for each in whole if f"{each}.".startswith(f"{place}.")}
        named = (name.rpartition(".")[2] for name in whole if ".tasks." in name)
        return inside | {words[each] for each in named if each in words}
    if isinstance(node, ast.Attribute):
        of_tasks = ast.unparse(node.value).rpartition(".")[2] == "tasks"
        return {node.attr} & {*words.values()} if of_tasks or node.attr not in LIBRARIES else set()
    if isinstance(node, ast.Name):
        return {node.id} & {*words.values()} - LIBRARIES
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {
            words[word] for word in {*re.findall(r"[A-Za-z_]+", node.value)} - LIBRARIES | {node.value} if word in words
        }
    return set()


def new_mechanism(package: pathlib.Path) -> int | None:
    """Files of the mechanism that the docs add as an example; None where they have none."""
    patch = package.parents[1] / "docs" / "howto" / "energy.patch"
    return patch.read_text(encoding="utf-8").count("\n+++ b/") if patch.exists() else None


def new_figure(trees: Mapping[str, ast.Module]) -> int | None:
    """Files that a figure touches; None where `figures` finds none."""
    if not figures(trees):
        return None
    return 2 + max((len(by) for by in known_figures(trees).values()), default=0)


def numbers(package: pathlib.Path) -> dict[str, int | None]:
    """What the table shows."""
    trees = files(package)
    arrows = imports(trees)
    return {
        "files": len(trees),
        "lines": sum(path.read_text(encoding="utf-8").count("\n") for path in package.rglob("*.py")),
        "at the root": len(list(package.glob("*.py"))),
        "folders": len(list(package.rglob("__init__.py"))) - 1,
        "longest chain": chain(rooms(arrows)),
        "circles": len(circles(arrows)),
        "Any": sum(map(anys, trees.values())),
        "splats": sum(map(splats, trees.values())),
        "** arguments": sum(map(double_splats, trees.values())),
        "a new mechanism": new_mechanism(package),
        "a new figure": new_figure(trees),
        "a new task": 1 + max((sum(".papers." not in f for f in by) for by in known_tasks(trees).values()), default=0),
    }


def main(places: list[str]) -> None:
    """A row a number, a column a tree."""
    default = str(pathlib.Path(__file__).parents[2] / "src" / "polyhead")
    columns = [numbers(pathlib.Path(place)) for place in places or [default]]
    for name in columns[0]:
        print(f"{name:15}", *(f"{'-' if column[name] is None else column[name]:>7}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])
