"""Text files are UTF-8 on every machine, and output works with any encoding of the console."""

import ast
import pathlib

import forked
import pytest
from some import some

ROOT = pathlib.Path(__file__).parents[2]
PLACES = ("src", "benchmarks", "examples", "docs", "packaging")
OTHERS = ("os", "engine", "Image", "tarfile", "zipfile")
"""Whose `open` is not of text."""


CALLS = ("read_text", "write_text", "open", "run", "Popen", "check_output")


def unencoded(source):
    """Lines where text is read or written in the encoding of the machine."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", getattr(call.func, "id", None)) not in CALLS:
            continue  # before it is written out, which takes its time
        owner, _, name = ast.unparse(call.func).rpartition(".")
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        words = [*call.args, named.get("mode")]
        binary = any(isinstance(word, ast.Constant) and word.value in ("rb", "wb", "ab", "r+b", "xb") for word in words)
        text = (
            name in CALLS[:2]
            or (name == "open" and owner.rpartition(".")[2] not in OTHERS and not binary)
            or (name in CALLS[3:] and "text" in named)
        )
        if text and "encoding" not in named:
            yield call.lineno


@pytest.mark.parametrize("place", PLACES)
def test_text_is_utf_8(place):
    files = some((ROOT / place).rglob("*.py"))
    assert not [f"{path}:{line}" for path in files for line in unencoded(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("path.read_text()", True),
        ("(folder / 'a').write_text('x')", True),
        ("open(path)", True),
        ("path.open('a', buffering=1)", True),
        ("open(path, mode='w')", True),
        ("subprocess.run(['x'], text=True)", True),
        ("path.read_text(encoding='utf-8')", False),
        ("open(path, 'rb')", False),
        ("self.path.open(mode='wb')", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("self.engine.open(runs, folder)", False),
        ("subprocess.run(['x'], check=True)", False),
    ],
)
def test_the_rule_sees_a_breach(line, bad):
    assert bool(list(unencoded(line))) == bad


COMMANDS = """
import sys
from polyhead.cli.verbs import main
sys.stdout = open(1, "w", encoding="ascii", closefd=False)
sys.stderr = open(2, "w", encoding="ascii", errors="backslashreplace", closefd=False)  # as Python opens it
for line in sys.argv[1:]:
    assert main(line.split()) == 0, line
"""


def test_output_survives_a_console_of_ascii(tmp_path):
    """R\u00b2, frames of tables and the like come as they can."""
    training = f"train fuzzy-hyla --train.steps 2 --train.batch_size 4 --train.eval_batches 1 --folder {tmp_path}/r"
    lines = ("list recipes", "list figures", "list mechanisms", "train fuzzy-hyla --help", training)
    code, said = forked.run(COMMANDS, *lines)
    assert code == 0, said
    assert said.isascii()
    assert "fuzzy-hyla: 2 steps" in said
