"""Kernels as compiled for cards that are not here, run by tests/support/ptx; and that emulator itself."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from ptx.instructions import to_bf16
from ptx.machine import Machine
from ptx.memory import Global
from ptx.program import Fault, parse

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "emulate.py"
KERNEL = """.visible .entry k(
.param .u64 x,
.param .u64 y
)
{
ld.param.b64 %rd1, [x];
ld.param.b64 %rd2, [y];
mov.b32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
ld.global.b32 %r2, [%rd4];
BODY
st.global.b32 [%rd5], %r3;
ret;
}
"""
X = np.linspace(-3, 3, 64, dtype=np.float32)


def run(body, x, size=256, room=256):
    """The result of 64 threads, each for one number: `body` turns %r2 into %r3, both in its thread %r1."""
    y = np.zeros(64, np.uint32)
    memory = Global([(x.ctypes.data, size, "x"), (y.ctypes.data, y.nbytes, "y")])
    given = {"x": x.ctypes.data, "y": y.ctypes.data}
    Machine(parse(KERNEL.replace("BODY", body)), given, [(0, 0, 0)], (1, 1, 1), 2, room, memory).run()
    return y


PARTED = """
setp.gt.s32 %p1, %r1, 40;
@%p1 bra $L1;
neg.f32 %r3, %r2;
bra $L2;
$L1:
mov.b32 %r3, %r2;
$L2:
add.f32 %r3, %r3, %r3;
"""
ONE = {
    PARTED: lambda x: 2 * np.where(np.arange(64) > 40, x, -x),
    "cvt.rn.bf16.f32 %rs1, %r2;\ncvt.f32.bf16 %r3, %rs1;": lambda x: (to_bf16(x).astype(np.uint32) << 16).view(
        np.float32
    ),
    "prmt.b32 %r3, %r2, 0, 0x1032;": lambda x: x.view(np.uint16).reshape(-1, 2)[:, ::-1].ravel().view(np.float32),
    "max.relu.s32 %r3, %r2, %r2;": lambda x: np.maximum(x, 0),  # of bits, which are below 0 where the number is
}
"""What the quick cases do not have."""


@pytest.mark.parametrize("body", ONE, ids=lambda body: body.split()[0])
def test_an_instruction_does_what_numpy_does(body):
    np.testing.assert_array_equal(run(body, X).view(np.float32), ONE[body](X))


@pytest.mark.parametrize(
    ("kind", "to_bits"), [("bf16", to_bf16), ("f16", lambda x: x.astype(np.float16).view(np.uint16))]
)
def test_halves_of_a_pair_are_compared_apart(kind, to_bits):
    """The first predicate is of the low half; -0 equals 0, and NaN equals nothing."""
    low, high = (np.resize(np.array(x, np.float32), 64) for x in ([0, -0.0, 1, np.nan], [2, 0, np.nan, 0, -0.0]))
    x = to_bits(high).astype(np.uint32) << np.uint32(16) | to_bits(low)
    body = f"mov.b32 %r4, 0;\nsetp.eq.{kind}x2 %p1|%p2, %r2, %r4;\nselp.b32 %r5, 1, 0, %p1;\nselp.b32 %r6, 2, 0, %p2;"
    np.testing.assert_array_equal(run(f"{body}\nadd.s32 %r3, %r5, %r6;", x), (low == 0) + 2 * (high == 0))


def test_the_tensor_cores_multiply_matrices():
    """16 x 8 by 8 x 8 in tf32, laid out by hand: lane l has rows l // 4 and that + 8, terms l % 4 and that + 4."""
    a, b = (np.arange(n, dtype=np.float32).reshape(-1, 8) % 7 - 3 for n in (128, 64))
    rows, terms = np.divmod(np.arange(64) % 32, 4)
    of_a = [a[rows + row, terms + term] for term in (0, 4) for row in (0, 8)]
    x = np.concatenate([*of_a, b[terms, rows], b[terms + 4, rows]])
    loads = "\n".join(f"ld.global.b32 %r{10 + n}, [%rd4 + {256 * n}];" for n in range(6))
    zeros = "{%r20, %r21, %r22, %r23}"
    start = "\n".join(f"mov.b32 %r{n}, 0;" for n in range(20, 24))
    name = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    product = f"{name} {zeros}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {zeros};"
    for place, (row, column) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
        came = run(f"{loads}\n{start}\n{product}\nmov.b32 %r3, %r{20 + place};", x, x.nbytes).view(np.float32)
        np.testing.assert_array_equal(came, (a @ b)[rows + row, 2 * terms + column])


FAULTS = {
    "outside of all tensors": ("mov.b32 %r3, %r2;", 255, 256),
    "a barrier that not all threads reach": ("setp.gt.s32 %p1, %r1, 40;\n@%p1 bar.sync 0;", 256, 256),
    "of shared memory": ("shl.b32 %r4, %r1, 2;\nst.shared.b32 [%r4], %r2;", 256, 252),
    "is no multiple of 4": ("add.s32 %r4, %r1, 1;\nst.shared.b32 [%r4], %r2;", 256, 256),
    "no instruction frobnicate.b32 is known": ("frobnicate.b32 %r3, %r2;", 256, 256),
}
"""What is told -> the body of a kernel, the bytes of x that are there, those of shared memory."""


@pytest.mark.parametrize("told", FAULTS)
def test_what_no_kernel_may_do_is_a_fault(told):
    body, size, room = FAULTS[told]
    with pytest.raises(Fault, match=told):
        run(body, X, size, room)


def emulated(asked):
    """In a process of its own, without the interpreter, which other tests need from the start."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run([sys.executable, SCRIPT, asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
def test_kernels_as_compiled_for_a_card_are_right():
    rows = emulated("--quick")["rows"]
    assert len(rows) == 5
    assert not {name: row["red"] for name, row in rows.items() if "red" in row}
    assert all(0 < max(row["errors"]) < 0.01 for row in rows.values())


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_what_is_planted_is_noticed():
    """Faults beyond what roundings do: a product with a single column, a mask's stride, one of its keys, scores that
    are 3 % too large.  Barriers and waits left out, all but one, probably that after the loop, when nothing is under
    way any more."""
    found = emulated("--planted")
    assert found["faults"] == dict.fromkeys(found["faults"], True)
    assert len(found["faults"]) == 4
    unnoticed = [where for where, noticed in found["waits"] if not noticed]
    assert len(found["waits"]) == 11
    assert [where.partition(": ")[2].split()[0] for where in unnoticed] == ["cp.async.wait_group"]
