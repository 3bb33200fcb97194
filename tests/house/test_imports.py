"""What is imported when: fresh processes, each step of which may load no more than it says.

JAX alone: jaxside/test_surface.py."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = """
def without(what, *names):
    assert not (found := {name.partition(".")[0] for name in sys.modules} & {*names}), (what, found)

import sys, polyhead
without("the package", "torch", "jax", "numpy", "sklearn", "plotly", "tyro", "yaml")
import polyhead.config
without("the configuration", "torch", "jax", "numpy", "tyro", "yaml")
from polyhead.cli.verbs import main
assert main(["--help"]) == 0
without("help", "torch", "jax", "numpy", "plotly", "sklearn")
"""
HELP = """
import sys
from polyhead.cli import main
assert main(["--help"]) == 0
assert not (found := {"polyhead.spec.table", "importlib.metadata", "torch"} & {*sys.modules}), found
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
ph.analysis, ph.compat.torch_mha
drawn = "plotly", "matplotlib", "tyro", "rich", "tqdm", "pandas"
without("layers", "sklearn", "scipy", "yaml", "transformers", *drawn)
ph.tasks.FuzzyLogic()
without("tasks", "sklearn", *drawn)
import polyhead.train
without("training", "wandb", "trackio", "tensorboard")
import polyhead.plan, polyhead.scale.plan.estimate as new  # an old name of a module, and a function
assert ph.plan is polyhead.plan is not new.plan
try:
    ph.plan(3)
except (AttributeError, AssertionError, TypeError):
    sys.exit(0)  # of the function: it was called with a number
sys.exit("nothing was called")
"""


@pytest.mark.parametrize("code", [WITHOUT_TORCH, HELP, WITH_TORCH], ids=["without torch", "help", "with torch"])
def test_what_is_imported(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
