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


BINDS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature
from ahead_of_time import QUICK
from polyhead.ops.hyla.triton.kernels import launches, prepare

backend = make_backend(GPUTarget("cuda", 90, 32))
ones = [torch.empty(1, n, h, 5, dtype=torch.bfloat16) for n, h in ((1, 4), (100, 2), (100, 2))]
small = prepare(*ones, None, None, None, causal=True, window=0, scale=0.1, normalise="rms_heads", act="relu")
for launch in [*(launch for case in QUICK for launch in case.make(227 << 10)), *launches(small)]:
    kernel, threads = launch.kernel, dict(num_warps=launch.warps, num_stages=launch.stages)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, found, rest = bind(*launch.args, **threads)
    compute_cache_key({}, found, rest)
    _, signature, constants, attributes = kernel._pack_args(backend, threads, bound, found, rest)
    source = launch.source()
    assert signature == source.signature, (signature, source.signature)
    assert {x: str(y) for x, y in constants.items()} == {x: str(y) for x, y in source.constants.items()}
    assert {x: y for x, y in attributes.items() if y} == source.attrs, (attributes, source.attrs)
    op, name = kernel.__module__.split(".")[2], kernel.__name__
    print(name if name.startswith(op) else op + "_" + name)
"""


def clean(*command, **more):
    """Run it without the interpreter, which other tests need from the start."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | more
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)


def run(*words):
    return clean(SCRIPT, "--quick", *words)


def test_what_is_compiled_ahead_of_time_is_what_a_launch_compiles():
    """Up to the compiler, a launch needs no GPU: triton names the types, ones and multiples of 16 of the arguments."""
    done = clean("-c", BINDS, PYTHONPATH=str(SCRIPT.parent))
    assert set(done.stdout.split()) == set(KERNELS), done.stderr


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
        (
            {"stack": {"any": -1}, "shared": {"sm_80": 10**6, "sm_89": 10**6, "sm_90": 10**6}},
            "0 bytes of stack, -1 allowed",
        ),
        (
            {"stack": {"any": 10**6}, "shared": {"sm_80": 10**6, "sm_89": 10**6, "sm_90": 40000}},
            "bytes of shared memory, 40000 allowed",
        ),
    ],
)
def test_what_is_over_the_budget_is_found(tmp_path, budget, said):
    (tmp_path / "budget.json").write_text(json.dumps(budget))
    done = run("--only", "linear", "--budget", str(tmp_path / "budget.json"))
    assert done.returncode == 1
    assert said in done.stdout, done.stdout + done.stderr
