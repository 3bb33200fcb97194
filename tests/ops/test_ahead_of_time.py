"""Every kernel compiles for cards that are not here, within its budget (benchmarks/ahead_of_time.py)."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from scripts import ROOT

SCRIPT = ROOT / "benchmarks" / "ahead_of_time.py"
KERNELS = [
    *("linear_sums", "linear_read", "hyla_forward", "hyla_queries", "hyla_keys", "hyla_softmax", "hyla_delta"),
    *(f"relational_{name}" for name in ("forward", "backward_queries", "backward_keys", "backward_offsets")),
]

pytestmark = [
    pytest.mark.campaign,  # test_emulator.py compiles kernels for a card in `make test`
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),
]


EDITS = {
    "nothing": [],
    "comments": [("# heads of the states", "# others"), ("import triton\n", "# Two\n# lines\nimport triton\n")],
    "docstrings": [('"""Indices of BLOCK columns', '"""BLOCK columns'), ("Compile-time constants", "Constants")],
    "a function that it calls": [("c = first + tl", "c = 1 + first + tl")],
    "a constant that it names": [("constexpr(3)", "constexpr(4)")],
    "what is compiled in": [("2: 64,", "2: 32,")],
    "another kernel": [("total += dot(left, right, C.state_dots)", "total -= dot(left, right, C.state_dots)")],
}
"""An edit of the file of a kernel -> texts, old and new."""

BINDS = f"""
import importlib.util, inspect, json, pathlib, sys, torch, triton
import triton.language as tl
import polyhead.ops.linear.triton.kernels as linear
EDITS = {EDITS!r}
"""
BINDS += """
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature
from unittest.mock import patch
from ahead_of_time import QUICK, QUICK_CARDS, Row, digest, main, measure, narrow, relational
from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.triton.kernels import launches, prepare

backend = make_backend(GPUTarget("cuda", 90, 32))
ones = [torch.empty(1, n, h, 5, dtype=torch.bfloat16) for n, h in ((1, 4), (100, 2), (100, 2))]
small = prepare(AttentionCall(*ones, causal=True, scale=0.1, normalise="rms_heads", act="relu"))
for launch in [*(launch for case in QUICK for launch in case.launches(227 << 10)), *launches(small)]:
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
    print("bound", name if name.startswith(op) else op + "_" + name)

for launch in relational(2, 16, 2, torch.float32, full=True).launches(227 << 10)[:2]:
    tensors, *rest = launch.args
    tensors = tuple(x.double() if isinstance(x, torch.Tensor) and x.ndim == 2 else x for x in tensors)
    triton.compile(replace(launch, args=(tensors, *rest)).source(), target=GPUTarget("cuda", 90, 32))
    print("wide bias", launch.kernel.__name__)

tight = {"stack": {"any": -1}, "shared": dict.fromkeys(("sm_80", "sm_90"), 4000)}
first = replace(QUICK[0], make=lambda shared: QUICK[0].launches(shared)[:1])
print("over", [row.broken for row in measure([first], tight, QUICK_CARDS[:1], {}, quick=True)])
known = {digest(launch, QUICK_CARDS[0]): launch for launch in QUICK[0].launches(227 << 10)}
with patch("ahead_of_time.fresh", lambda launch, *rest: Row("new", "", "", 0, 0, 0, 9, "")):
    old = {source: Row("old", "", "sm_80", 9, 99, 0, 9, "", source=source) for source in [*known][:1]}
    fine = tight | {"stack": {"any": 98}}
    print("again", [(row.kernel, row.broken) for row in measure(QUICK[:1], fine, QUICK_CARDS[:1], old, quick=False)])
code = "%3 = tt.dot %1, %2, %0 : tensor<16x8x16xbf16> * tensor<16x16xNxbf16> -> tensor<16x8xNxf32>"
print("narrow", [*narrow(code.replace("N", "1"))])
print("not narrow", [*narrow(code.replace("N", "2"))])

def again(number, changes, known):
    text = inspect.getsource(linear) + "\\nTHRICE = tl.constexpr(3)\\n"
    for old, new in [("return c, c < END", "return c, c < END * THRICE"), *changes]:
        assert old in text, old
        text = text.replace(old, new)
    file = pathlib.Path(sys.argv[-1]).with_name(f"edited_{number}.py")
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    sys.modules[file.stem] = edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    q = torch.empty(1, 256, 8, 64, dtype=torch.bfloat16, device="meta")
    case = replace(QUICK[0], make=lambda shared: edited.launches(q, q, q, None, 64)[:1])
    return [*measure([case], fine, QUICK_CARDS[:1], known, quick=True)]


with patch("ahead_of_time.fresh", lambda launch, *rest: Row("new", "", "sm_80", 0, 0, 0, 9, "")):
    first = {row.source: replace(row, kernel="old") for row in again(0, [], {})}
    for number, (what, changes) in enumerate(EDITS.items(), 1):
        print("edited", what + ":", *(row.kernel for row in again(number, changes, first)))
sys.exit(main())
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """One process does it all, without the interpreter, which other tests need from the start."""
    table = tmp_path_factory.mktemp("kernels") / "found.json"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join((str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")))}
    words = [sys.executable, "-c", BINDS, "--quick", "--json", str(table)]
    return subprocess.run(words, capture_output=True, text=True, env=env), table


def told(done, word):
    return [line.removeprefix(word).strip() for line in done.stdout.splitlines() if line.startswith(word)]


def test_what_is_compiled_ahead_of_time_is_what_a_launch_compiles(compiled):
    """Up to the compiler, a launch needs no GPU: triton names the types, ones and multiples of 16 of the arguments."""
    done, _ = compiled
    assert set(told(done, "bound")) == set(KERNELS), done.stderr


def test_a_bias_may_be_wider_than_the_tensors(compiled):
    """As one from NumPy is.  The interpreter takes any mixture of dtypes."""
    assert told(compiled[0], "wide bias") == ["forward", "backward_queries"], compiled[0].stderr


def test_one_configuration_of_each_kernel_stays_within_its_budget(compiled):
    done, table = compiled
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(table.read_text())["kernels"]
    assert sorted(row["kernel"] for row in rows) == sorted(KERNELS)
    assert {row["card"] for row in rows} == {"sm_80", "sm_90"}  # in turn; both are in the campaign
    assert all(row["registers"] > 0 and row["shared"] > 0 and row["tensor_cores"] > 0 for row in rows)


def test_what_breaks_the_rules_of_today_is_found(compiled):
    """Whether it is compiled now or was before."""
    (broken,), (rows,) = (told(compiled[0], word) for word in ("over", "again"))
    assert broken.count("bytes of stack, -1 allowed") == broken.count("bytes of shared memory, 4000 allowed") == 1
    assert rows.startswith("[('old', '99 bytes of stack, 98 allowed'), ('new', '')")
    assert told(compiled[0], "narrow") == ["['a product with a single column']"]
    assert told(compiled[0], "not narrow") == ["[]"]


def test_what_was_compiled_stays_valid_until_its_code_changes(compiled):
    """A kernel is compiled anew if it, what it calls or a constant changes, and not if prose or another kernel does."""
    found = dict(line.split(": ") for line in told(compiled[0], "edited"))
    kept = "nothing", "comments", "docstrings", "another kernel"
    assert found == {what: "old" if what in kept else "new" for what in EDITS}
