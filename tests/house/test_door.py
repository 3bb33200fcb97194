"""The public names: type checkers see what exists, `dir` lists exactly these names, and what is imported when."""

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import polyhead as ph

SOURCE = pathlib.Path(ph.__file__)


def typed():
    """name -> (module, attribute) of the imports under TYPE_CHECKING; `*` is what the module offers, and `load = _name`
    gives what was imported as `_name`: type checkers that are strict see no other way to export it as `load`."""
    block = next(n for n in ast.parse(SOURCE.read_text()).body if isinstance(n, ast.If))
    found = [(n.module, alias) for n in block.body if isinstance(n, ast.ImportFrom) for alias in n.names]
    stars = [module for module, alias in found if alias.name == "*"]
    names = {name: (module, name) for module in stars for name in importlib.import_module(module).__all__}
    names |= {alias.asname: (module, alias.name) for module, alias in found if alias.name != "*"}
    assigned = (n for n in block.body if isinstance(n, ast.Assign))
    names |= {n.targets[0].id: names.pop(n.value.id) for n in assigned}
    return names


def test_a_type_checker_sees_what_is_there_under_names_of_their_own():
    assert dir(ph) == sorted(ph.__all__) == sorted(typed())
    for name, (module, attribute) in typed().items():
        assert getattr(ph, name) is getattr(importlib.import_module(module), attribute)
    classes = [name for name in ph.__all__ if name[0].isupper()]
    assert len({name.lower() for name in classes}) == len(classes), "two that differ in case alone"


# Fresh processes, each step of which may load no more than it says.  JAX alone: jaxside/test_surface.py.
WITHOUT_TORCH = """
def without(what, *names):
    assert not (found := {name.partition(".")[0] for name in sys.modules} & {*names}), (what, found)

import sys, polyhead
without("the package", "torch", "jax", "numpy", "sklearn", "plotly", "tyro", "yaml")
from polyhead.cli import main
assert main(["--help"]) == 0
without("help", "torch", "jax", "numpy", "sklearn")
import polyhead.config
without("the configuration", "torch", "jax", "numpy", "yaml")
"""
WITH_TORCH = """
import sys, torch
before = set(sys.modules)

def without(what, *names):
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not (found := new & {*names}), (what, found)

import polyhead.ops, einops._backends
# Otherwise what einops learns in a compiled graph's first call would make that graph anew in its second.
assert {kind.__name__ for kind in einops._backends._type2backend} == {"Parameter", "Tensor"}
import polyhead as ph
ph.MultiHeadAttention(8, [ph.Softmax(2), ph.Hyla(2)]); ph.ops.hyla
q = k = v = torch.ones(1, 3, 2, 4)
attend = torch.compile(lambda q, k, v: ph.ops.linear_attention(q, k, v, causal=True), backend="eager", fullgraph=True)
assert torch.equal(attend(q, k, v), ph.ops.linear_attention(q, k, v, causal=True))
ph.analysis, ph.compat.torch_mha
drawn = "plotly", "matplotlib", "tyro", "rich", "tqdm", "pandas"
without("layers", "sklearn", "scipy", "yaml", "transformers", *drawn)
ph.tasks.FuzzyLogic()
without("tasks", "sklearn", *drawn)
import polyhead.train
without("training", "wandb", "trackio", "tensorboard")
"""


@pytest.mark.parametrize("code", [WITHOUT_TORCH, WITH_TORCH], ids=["without torch", "with torch"])
def test_what_is_imported(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
