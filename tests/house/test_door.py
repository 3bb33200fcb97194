"""The door: what a type checker sees is what is there, `dir` lists it and nothing else, old names lead to new ones."""

import ast
import importlib
import importlib.util
import pathlib
import subprocess
import sys

import pytest

import polyhead as ph

SOURCE = pathlib.Path(ph.__file__)


def typed():
    """name -> (module, attribute) of the imports under TYPE_CHECKING."""
    block = next(n for n in ast.parse(SOURCE.read_text()).body if isinstance(n, ast.If))
    return {
        alias.asname or alias.name: (n.module, alias.name)
        for n in block.body
        if isinstance(n, ast.ImportFrom)
        for alias in n.names
    }


def test_a_type_checker_sees_what_is_there():
    modules = {name: tuple(where.rsplit(".", 1)) for name, where in ph._MODULES.items()}
    assert typed() == ph._HOME | modules
    assert dir(ph) == sorted(ph.__all__) == sorted(typed())


@pytest.mark.parametrize("name", ph.__all__)
def test_every_name_is_there(name):
    module, attribute = typed()[name]
    assert getattr(ph, name) is getattr(importlib.import_module(module), attribute, None) or name in ph._MODULES


@pytest.mark.parametrize("old", ph._MOVED)
def test_an_old_name_leads_to_the_new_one_and_says_so(old, monkeypatch):
    new = importlib.import_module(ph._MOVED[old])
    monkeypatch.delitem(sys.modules, old, raising=False)
    parent, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"^{old} is {ph._MOVED[old]} now$"):
        found = importlib.import_module(old)
    vars(sys.modules[parent]).pop(name)  # which an import sets, and would hide a function of that name
    public = [name for name in vars(new) if not name.startswith("_")]
    assert public
    assert all(getattr(found, name) is getattr(new, name) for name in public)


CALLED = """
import polyhead.plan, polyhead as ph, polyhead.scale.plan.estimate as new
assert ph.plan is polyhead.plan is not new.plan
try:
    ph.plan(3)
except (AttributeError, AssertionError, TypeError):
    raise SystemExit(0)  # of the function: it was called with a number
raise SystemExit("nothing was called")
"""


def test_a_function_is_called_where_a_module_of_its_name_was():
    subprocess.run([sys.executable, "-W", "ignore", "-c", CALLED], check=True)


FOLDERS = {
    ".".join(("polyhead", *path.parent.relative_to(SOURCE.parent).parts)): path
    for path in sorted(SOURCE.parent.glob("*/**/__init__.py"))
}
PACKAGES = [name for name, path in FOLDERS.items() if "__all__" in path.read_text()]
OFFERED = ("analysis", "cli", "compat", "config", "jaxside", "layers", "models", "ops", "pages", "papers", "scale")
OFFERED += ("spec", "tasks", "timing", "train")


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_lists_what_a_package_offers(name):
    package = importlib.import_module(name)
    assert dir(package) == sorted(package.__all__)
    assert len(set(package.__all__)) == len(package.__all__)
    for offered in package.__all__ if name != "polyhead.compat.huggingface" else ():  # needs transformers
        assert getattr(package, offered) is not None
    with pytest.raises(AttributeError, match=f"{name}.* has no attribute 'nothing'"):
        _ = package.nothing


def test_every_family_offers_something():
    assert {f"polyhead.{name}" for name in OFFERED} <= set(PACKAGES)


def test_modules_and_values_are_shown_in_short():
    attention = ph.MultiHeadAttention(64, [ph.Softmax(4), ph.Hyla(4, kv_heads=2)], causal=True)
    shown = repr(attention)
    for part in ("64, heads=8, causal=True", "SoftmaxHeads(heads=4, dim=8, value_dim=8)", "value_dim=8, kv_heads=2)"):
        assert part in shown
    task = ph.tasks.FuzzyLogic(length=8)
    run = ph.Run(task, ph.TransformerConfig(*task.ends, dim=32, heads=[ph.Hyla(4)], max_length=8), name="a<b")
    assert "dim=32, layers=2, heads=[Hyla(4)], causal=False" in repr(ph.Transformer(run.model))
    assert repr(run).startswith(
        "Run('a<b', FuzzyLogic, Transformer(dim=32, layers=2, heads=[Hyla(4)]), 1000 steps of 128"
    )
    assert ph.digest(run) in repr(run)
    assert "<caption>Run a&lt;b</caption>" in run._repr_html_()
    scores = {"iid": {"loss": 0.5, "r2": 0.25, "r2_se": 0.125, "sequences": 4}}
    result = ph.train.Result("run", "d", 9, 1.0, 1000, scores, "", {}, pathlib.Path("runs/run"))
    assert repr(result) == "Result('run', 9 steps, iid: loss 0.500, r2 0.250 ± 0.125, folder='runs/run')"
    assert '<td style="text-align:left">r2 0.250 ± 0.125</td>' in result._repr_html_()
    assert "1,000" in result._repr_html_()


USER = """
import polyhead as ph
reveal_type(ph.MultiHeadAttention)
reveal_type(ph.plan)
ph.Softmax(4, oops=3)
ph.TransformerConfig(dimm=64)
ph.MultiHeadAtention
ph.train.run(3)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed (extra `dev`)")
def test_the_types_fit(tmp_path):
    """mypy over the package, as `make lint` runs it, and over a user's file: one run, which starts from its cache."""
    user = tmp_path / "user.py"
    user.write_text(USER)
    command = [sys.executable, "-m", "mypy", "src/polyhead", str(user)]
    done = subprocess.run(command, cwd=SOURCE.parents[2], capture_output=True, text=True, check=False)
    *lines, end = done.stdout.splitlines()
    of_user = {int(line.split(":")[1]): line for line in lines if "user.py:" in line}  # the cache knows its first path
    assert len(of_user) == len(lines) == 6, done.stdout + done.stderr
    assert end.startswith("Found 4 errors in 1 file")
    words = (3, 'Revealed type is "def ('), (3, "MultiHeadAttention"), (4, "Plan"), (5, "oops"), (6, "dimm")
    for number, word in (*words, (7, "MultiHeadAtention"), (8, "arg-type")):
        assert word in of_user[number], of_user
