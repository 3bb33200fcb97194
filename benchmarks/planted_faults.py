"""Plant random faults in the source, one at a time, and list those that no test of their area notices.

    python benchmarks/planted_faults.py --faults 40 --seed 0
    python benchmarks/planted_faults.py --faults 40 --before ../earlier     # after tests were rewritten

A fault is a small change of one expression: another comparison, `and` for `or`, a sum for a difference, a constant that
is one larger, a condition negated.  The tests of the area run until one fails, those whose names fit the file first.
With `--before`, another checkout, faults lie in lines that both have, and what goes unnoticed here is planted there as
well: a fault that only the earlier tests notice is one that was lost.  Kernels for cards are left out.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    "config": ("config", "tasks", "models"),
    "models": ("models", "layers"),
    "spec": ("spec", "ops"),
    "train": ("train", "loaders"),
}
"""Folder of the package -> folders of its tests, where they are not that of the same name alone."""
LEFT_OUT = ("triton", "ops/first_use", "ops/cards")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One change of one line; `noticed` by the test that failed, None if none did."""

    file: str
    line: str
    before: str
    after: str
    noticed: str | None = None


def changed(node: ast.AST) -> str | None:
    """The node with a fault, as source; None if it is no place for one."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        swapped = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        return ast.unparse(ast.Compare(node.left, swapped, node.comparators))  # type: ignore[arg-type]
    if isinstance(node, ast.BoolOp):
        return ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        return ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.unparse(node.operand)
    if isinstance(node, ast.IfExp):
        return ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse))
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        return str(not node.value if isinstance(node.value, bool) else node.value + 1)
    return None


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of function bodies, without annotations, f-strings and decorators."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            queue: list[ast.AST] = list(function.body)
            while queue:
                node = queue.pop()
                if isinstance(node, (ast.JoinedStr, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    continue
                yield node
                hidden = {id(node.annotation)} if isinstance(node, ast.AnnAssign) else set()
                queue += [child for child in ast.iter_child_nodes(node) if id(child) not in hidden]


def faults(root: Path, other: Path | None) -> Iterator[Fault]:
    """All that could be planted on one line that occurs once in its file, in `other` as well."""
    for path in sorted((root / "src" / "polyhead").rglob("*.py")):
        file = str(path.relative_to(root))
        if any(word in file for word in LEFT_OUT) or path.parent.name == "polyhead":
            continue
        if other and not (other / file).exists():
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        texts = [lines] + ([(other / file).read_text(encoding="utf-8").splitlines()] if other else [])
        for node in places(ast.parse(text)):
            after = changed(node)
            if after is None or node.lineno != node.end_lineno:  # type: ignore[attr-defined]
                continue
            line = lines[node.lineno - 1]  # type: ignore[attr-defined]
            start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
            raw = line.encode()
            planted = (raw[:start] + b"(" + after.encode() + b")" + raw[end:]).decode()
            if all(known.count(line) == 1 for known in texts) and planted != line:
                yield Fault(file, line, raw[start:end].decode(), planted)


def copied(root: Path, into: Path) -> Path:
    """A copy in which faults are planted, without what tests do not read."""
    unread = shutil.ignore_patterns(".git", ".venv", "runs", "_build", "__pycache__", ".*_cache")
    return Path(shutil.copytree(root, into, ignore=unread, symlinks=True))


def noticed(fault: Fault, root: Path) -> str | None:
    """The first test in the copy `root` that fails with the fault."""
    path = root / fault.file
    text = path.read_text(encoding="utf-8")
    area = Path(fault.file).parts[2]
    folders = [root / "tests" / name for name in TESTS.get(area, (area,))]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    words = {*path.stem.split("_"), path.parent.name} - {"task", "reference"}
    files.sort(key=lambda file: -len(words & {*file.stem.split("_"), *file.parent.name.split("_")}))
    planted = [fault.after if line == fault.line else line for line in text.splitlines()]
    path.write_text("\n".join(planted) + "\n", encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not compile",
             "--timeout", "120", *map(str, files)],
            cwd=root, env=os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, encoding="utf-8", check=False,
        )  # fmt: skip
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return None
    if "ImportError while loading conftest" in done.stderr:
        return "a conftest.py that cannot be imported"
    if done.returncode not in (1, 2):  # 2: an import failed
        raise SystemExit(f"planted_faults: pytest did not run\n{done.stdout}{done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit code {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", type=Path, help="another checkout, in which what goes unnoticed is planted as well")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    by_area: dict[str, list[Fault]] = {}
    for fault in faults(ROOT, given.before):
        by_area.setdefault(Path(fault.file).parts[2], []).append(fault)
    draw = random.Random(given.seed)
    areas = sorted(by_area)
    drawn = [draw.choice(by_area[areas[i % len(areas)]]) for i in range(given.faults)]
    found: list[dict] = []
    with tempfile.TemporaryDirectory() as place:
        here = copied(ROOT, Path(place) / "here")
        there = copied(given.before, Path(place) / "before") if given.before else None
        for fault in drawn:
            by = noticed(fault, here)
            earlier = noticed(fault, there) if there and by is None else None
            found.append({**asdict(fault), "noticed": by, "earlier": earlier})
            word = "noticed" if by else "LOST, noticed before" if earlier else "unnoticed"
            print(
                f"{word:12} {fault.file}: {fault.line.strip()} -> {fault.after.strip()}  {by or earlier or ''}",
                flush=True,
            )
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    caught = sum(row["noticed"] is not None for row in found)
    print(f"{caught} of {len(found)} faults noticed, {sum(row['earlier'] is not None for row in found)} lost")


if __name__ == "__main__":
    main()
