"""Examples in docstrings run; output is readable on a console of ASCII."""

import ast
import doctest
import importlib
import re

import forked
import pytest
import torch
from jaxtyping import Float
from scripts import PACKAGE, loaded, short_name
from some import some

import polyhead as ph

SOURCES = sorted(PACKAGE.rglob("*.py"))


def docstrings(path):
    """(name, docstring) of a file and everything in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield getattr(node, "name", path.stem), ast.get_docstring(node) or ""


EXAMPLES = [
    pytest.param(path, doc, id=f"{path.relative_to(PACKAGE)}:{owner}")
    for path in SOURCES
    if ">>> " in path.read_text()  # parsing takes its time
    for owner, doc in docstrings(path)
    # what writes a report needs finished runs
    if re.search(r"^\s*>>> (?!polyhead )", doc, re.M) and path.parts[-2:] != ("report", "writer.py")
]


def namespace_of(module, doc):
    """What an example in a docstring may take for granted: its file, the public names, and a small world."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 4, 8)
    task = ph.tasks.FuzzyLogic()
    settings = ph.TransformerConfig(*task.ends, dim=64, heads=(ph.Hyla(8),), layers=1)
    count = 2000 if "probe(" in doc else 40
    data = {"q": q, "k": k, "v": v, "task": task, "model": ph.Transformer(settings)}
    data |= {"batch": task.batch("iid", 4, seed=0, step=0), "labels": torch.randint(4, (count,))}
    data |= {"targets": torch.rand(count).numpy(), "terms": torch.randint(4, (count, 2)).numpy(), "zeros": torch.zeros}
    data |= dict(zip(("q_rel", "k_rel", "symbols"), torch.randn(3, 2, 6, 4, 8), strict=True))
    data["relation_weight"] = torch.randn(4, 8, 4)
    if not re.search(r"\bcodes\(", doc):  # otherwise it is the function of that name
        data["codes"] = torch.randn(count, 8)
    names = {key: value for key, value in vars(module).items() if not key.startswith("__")}
    analysis = {key: getattr(ph.analysis, key) for key in ph.analysis.__all__}
    tools = {"torch": torch, "Float": Float, "Tensor": torch.Tensor}
    return {**analysis, **{key: getattr(ph, key) for key in ph.__all__}, **tools, **names, **data}


def check_example(example, namespace, capsys):
    """Run one `>>>` line; an output is compared where the docstring gives one."""
    code = compile(example.source, "<docstring>", "single")
    capsys.readouterr()
    try:
        exec(code, namespace)
        output = capsys.readouterr().out
    except ValueError as error:
        output = f"ValueError: {error}\n"
        assert example.want, output
    if example.want:
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(example.want, output, flags), output


@pytest.mark.parametrize(("path", "doc"), EXAMPLES)
def test_examples_in_docstrings(path, doc, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    namespace = namespace_of(module, doc)
    for example in some(doctest.DocTestParser().get_examples(doc)):
        check_example(example, namespace, capsys)


HEADING = re.compile(r"^(?:Args|Attributes|Returns|Yields|Raises):$", re.M)


@pytest.mark.parametrize("path", SOURCES, ids=short_name)
def test_sections_explain_names_that_exist_and_hold_the_errors(path):
    """Google's style: entries of Args and Attributes are names in the code; after a paragraph errors are in Raises."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or not ast.get_docstring(node):
            continue
        doc = ast.get_docstring(node)
        names = {getattr(part, key, None) for part in ast.walk(node) for key in ("arg", "id", "attr", "name")}
        for entries in re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)+)", doc, re.M):
            explained = set(re.findall(r"^ {4}\**(\w+): ", entries, re.M))
            assert explained
            assert explained <= names, node.name
        assert not re.search(r"\bRaises? \w*Error\b", HEADING.split(doc)[0].partition("\n\n")[2]), node.name


def test_examples_in_what_gives_docstrings_to_the_site():
    result = doctest.testmod(loaded("docs", "_ext", "plain_docstrings.py"))
    assert (result.failed, result.attempted) == (0, 4)


COMMANDS = """
import sys
from polyhead.cli.dispatch import main
sys.stdout = open(1, "w", encoding="ascii", closefd=False)
sys.stderr = open(2, "w", encoding="ascii", errors="backslashreplace", closefd=False)  # as Python opens it
for line in sys.argv[1:]:
    assert main(line.split()) == 0, line
"""


def test_output_survives_a_console_of_ascii(tmp_path):
    """R\u00b2, frames of tables and the like come as they can."""
    training = f"train fuzzy-hyla --train.steps 2 --train.batch_size 4 --train.eval_batches 1 --folder {tmp_path}/r"
    lines = ("list recipes", "list figures", "list mechanisms", "train fuzzy-hyla --help", training)
    code, printed = forked.run(COMMANDS, *lines)
    assert code == 0, printed
    assert printed.isascii()
    assert "fuzzy-hyla: 2 steps" in printed
