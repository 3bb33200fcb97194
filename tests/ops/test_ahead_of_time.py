"""Every kernel compiles for cards that are not here, within its budget (benchmarks/ahead_of_time.py)."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "ahead_of_time.py"
KERNELS = [
    *("linear_sums", "linear_read", "hyla_forward", "hyla_queries", "hyla_keys", "hyla_lse", "hyla_delta"),
    *(f"relational_{name}" for name in ("forward", "backward_queries", "backward_keys", "backward_offsets")),
]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),
]


def run(*words):
    """Without the interpreter, which other tests need from the start."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, SCRIPT, "--quick", *words], capture_output=True, text=True, env=env)


def test_one_configuration_of_each_kernel_stays_within_its_budget(tmp_path):
    done = run("--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["kernels"]
    assert sorted((row["kernel"], row["card"]) for row in rows) == sorted(
        (kernel, card) for kernel in KERNELS for card in ("sm_80", "sm_90")
    )
    assert all(row["registers"] > 0 and row["shared"] > 0 and row["tensor_cores"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"stack": {"any": -1}, "shared": {"sm_80": 10**6, "sm_90": 10**6}}, "0 bytes of stack, -1 allowed"),
        (
            {"stack": {"any": 10**6}, "shared": {"sm_80": 10**6, "sm_90": 40000}},
            "bytes of shared memory, 40000 allowed",
        ),
    ],
)
def test_what_is_over_the_budget_is_found(tmp_path, budget, said):
    (tmp_path / "budget.json").write_text(json.dumps(budget))
    done = run("--only", "linear", "--budget", str(tmp_path / "budget.json"))
    assert done.returncode == 1
    assert said in done.stdout, done.stdout + done.stderr
