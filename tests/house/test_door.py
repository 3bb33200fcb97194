"""The public names: type checkers see what exists, `dir` lists exactly these names, and what is imported when."""

import ast
import pathlib
import subprocess
import sys

import pytest

import polyhead as ph


def test_a_type_checker_sees_what_is_there():
    """The imports under TYPE_CHECKING give the names of the package, and the same objects."""
    block = next(node for node in ast.parse(pathlib.Path(ph.__file__).read_text()).body if isinstance(node, ast.If))
    typed = {}
    exec(compile(ast.Module(block.body, []), "typed", "exec"), typed)
    names = [name for name in typed if not name.startswith("_")]
    assert dir(ph) == sorted(ph.__all__) == sorted(names)
    assert all(typed[name] is getattr(ph, name) for name in names)


# Fresh processes, each step of which may load no more than it says.  JAX alone: jaxside/test_surface.py.
WITHOUT_TORCH = """
def without(step, *names):
    imported = {name.partition(".")[0] for name in sys.modules}
    assert not imported & {*names}, (step, imported & {*names})

import sys, polyhead
without("the package", "torch", "jax", "numpy", "sklearn", "plotly", "tyro", "yaml")
from polyhead.cli import main
assert main(["--help"]) == 0
without("help", "torch", "jax", "numpy", "sklearn")
import polyhead.config
without("the configuration", "torch", "jax", "numpy", "yaml")
import polyhead.scale.sweep.engines.slurm
without("a job of Slurm, beside its worker", "torch", "jax", "yaml")
"""
WITH_TORCH = """
import sys, torch
before = set(sys.modules)

def without(step, *names):
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not imported & {*names}, (step, imported & {*names})

import polyhead as ph
ph.MultiHeadAttention(8, [ph.Softmax(2), ph.Hyla(2)]); ph.ops.hyla
ph.analysis, ph.compat.torch_mha
drawn = "plotly", "matplotlib", "tyro", "rich", "tqdm", "pandas"
without("layers", "sklearn", "scipy", "yaml", "transformers", *drawn)
task = ph.tasks.FuzzyLogic(length=4)
without("tasks", "sklearn", *drawn)
model = ph.TransformerConfig(*task.ends, dim=4, layers=1, heads=ph.Hyla(1), positions=ph.RelativeBias(), max_length=4)
run = ph.Run(task=task, model=model, train=ph.Train(steps=1, eval_batches=1), folder=sys.argv[1])
ph.train.run(run, progress=False)
without("training", "wandb", "tensorboard", "sympy")
assert "torch._dynamo" not in sys.modules
q = k = v = torch.ones(1, 3, 2, 4)
attend = torch.compile(lambda q, k, v: ph.ops.linear_attention(q, k, v, causal=True), backend="eager", fullgraph=True)
assert torch.equal(attend(q, k, v), ph.ops.linear_attention(q, k, v, causal=True))
"""


@pytest.mark.parametrize("code", [WITHOUT_TORCH, WITH_TORCH], ids=["without torch", "with torch"])
def test_no_step_imports_more_than_it_says(code, tmp_path):
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", code, tmp_path], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
