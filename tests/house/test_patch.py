"""The patch of docs/howto/mechanism.md, a mechanism in the package, applies to the source as it is and works."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
CHECK = """
import sys
import pytest, torch
import polyhead as ph
layer = ph.MultiHeadAttention(16, [ph.Energy(2), ph.Softmax(2)], causal=True)
assert layer(torch.randn(2, 9, 16)).shape == (2, 9, 16)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/ops/test_equations.py", "-k", "energy"]))
"""


def test_the_patch_of_a_new_mechanism_applies_and_its_equation_holds(tmp_path):
    for folder in ("src", "tests/ops", "tests/support"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    subprocess.run(["git", "apply", str(ROOT / "docs" / "howto" / "energy.patch")], cwd=tmp_path, check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    subprocess.run([sys.executable, "-c", CHECK], cwd=tmp_path, env=environment, check=True)


def test_the_patch_has_fifty_new_lines():
    """Without blank lines, and without the new form of lines that change."""
    lines = (ROOT / "docs" / "howto" / "energy.patch").read_text().splitlines()
    added = [line for line in lines if line.startswith("+") and line.strip() != "+" and not line.startswith("+++")]
    changed = [line for line in lines if line.startswith("-") and not line.startswith("---")]
    assert len(added) - len(changed) <= 50
