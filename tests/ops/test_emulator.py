"""Kernels as compiled for cards that are not here, run by tests/support/ptx; and that emulator itself."""

import importlib.util
import json
import os
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
HEAD = ".visible .entry k(\n.param .u64 x,\n.param .u64 y\n)\n{\n"
FRAME = """
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


def run(body, x=X, *, warps=2, frame=FRAME, room=256, size=None):
    """The result of 64 threads, each for one number: `body` turns %r2 into %r3, both in its thread %r1."""
    y = np.zeros(64, np.uint32)
    spans = [(x.ctypes.data, x.nbytes if size is None else size, "x"), (y.ctypes.data, y.nbytes, "y")]
    given = {"x": x.ctypes.data, "y": y.ctypes.data}
    program = parse(HEAD + frame.replace("BODY", body))
    machine = Machine(program, given, [(0, 0, 0)], (1, 1, 1), warps, room, Global(spans))
    races = machine.run()
    return y.view(x.dtype) if x.dtype == np.float32 else y, races


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


def rounded(x):
    return (to_bf16(x).astype(np.uint32) << 16).view(np.float32)


ONE = {
    "add.f32 %r3, %r2, %r2;": lambda x: x + x,
    "fma.rn.f32 %r3, %r2, %r2, 0f3F800000;": lambda x: (x.astype(float) ** 2 + 1).astype(np.float32),
    "max.f32 %r3, %r2, 0f00000000;": lambda x: np.maximum(x, 0),
    "setp.lt.f32 %p1, %r2, 0f00000000;\nselp.f32 %r3, 0f40000000, %r2, %p1;": lambda x: np.where(x < 0, 2, x),
    "cvt.rn.bf16.f32 %rs1, %r2;\ncvt.f32.bf16 %r3, %rs1;": lambda x: rounded(x),
    "cvt.rn.f16.f32 %rs1, %r2;\ncvt.f32.f16 %r3, %rs1;": lambda x: x.astype(np.float16).astype(np.float32),
    "shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;": lambda x: x.reshape(-1, 2)[:, ::-1].ravel(),
    "prmt.b32 %r3, %r2, 0, 0x3210;": lambda x: x,
    "max.relu.s32 %r3, %r2, %r2;": lambda x: np.maximum(x, 0),  # of bits, which are below 0 where the number is
    "mov.b32 {%rs1, %rs2}, %r2;\nmov.b32 %r3, {%rs1, %rs2};": lambda x: x,
    "mov.b32 %r3, %r2;\n@%p9 mov.b32 %r3, 0f00000000;": lambda x: x,
    PARTED: lambda x: 2 * np.where(np.arange(64) > 40, x, -x),
}  # fmt: skip


@pytest.mark.parametrize("body", ONE, ids=lambda body: body.split()[0])
def test_an_instruction_does_what_numpy_does(body):
    came, _ = run(body)
    np.testing.assert_array_equal(came, np.asarray(ONE[body](X), np.float32))


@pytest.mark.parametrize(
    ("kind", "to_bits"), [("bf16", to_bf16), ("f16", lambda x: x.astype(np.float16).view(np.uint16))]
)
def test_halves_of_a_pair_are_compared_apart(kind, to_bits):
    """The first predicate is of the low half; -0 equals 0, and NaN equals nothing."""
    low, high = (np.resize(np.array(x, np.float32), 64) for x in ([0, -0.0, 1, np.nan], [2, 0, np.nan, 0, -0.0]))
    x = (to_bits(high).astype(np.uint32) << np.uint32(16) | to_bits(low)).view(np.float32)
    body = f"mov.b32 %r4, 0;\nsetp.eq.{kind}x2 %p1|%p2, %r2, %r4;\nselp.b32 %r5, 1, 0, %p1;\nselp.b32 %r6, 2, 0, %p2;"
    came, _ = run(f"{body}\nadd.s32 %r3, %r5, %r6;", x)
    np.testing.assert_array_equal(came.view(np.uint32), (low == 0) + 2 * (high == 0))


def test_bfloat16_is_the_nearest_with_ties_to_even():
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), np.inf], np.float32)
    assert rounded(x).tolist() == [1, 1, 1 + 2**-6, -(1 + 2**-7), np.inf]


def test_the_tensor_cores_multiply_matrices():
    """16 x 8 by 8 x 8 in tf32, laid out by hand: lane l has rows l // 4 and that + 8, terms l % 4 and that + 4."""
    a, b = (np.arange(n, dtype=np.float32).reshape(-1, 8) % 7 - 3 for n in (128, 64))
    lane = np.arange(64) % 32
    rows, terms = lane // 4, lane % 4
    picked = [
        a[rows, terms],
        a[rows + 8, terms],
        a[rows, terms + 4],
        a[rows + 8, terms + 4],
        b[terms, rows],
        b[terms + 4, rows],
    ]
    x = np.concatenate(picked).astype(np.float32)
    loads = "\n".join(f"ld.global.b32 %r{10 + n}, [%rd4 + {256 * n}];" for n in range(6))
    zeros = "{%r20, %r21, %r22, %r23}"
    start = "\n".join(f"mov.b32 %r{n}, 0;" for n in range(20, 24))
    name = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    product = f"{name} {zeros}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {zeros};"
    for place, (row, column) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
        came, _ = run(f"{loads}\n{start}\n{product}\nmov.b32 %r3, %r{20 + place};", x)
        wanted = (a @ b)[rows + row, 2 * terms + column]
        np.testing.assert_array_equal(came, wanted)


EXCHANGE = """
shl.b32 %r4, %r1, 2;
xor.b32 %r5, %r4, 128;
st.shared.b32 [%r4], %r2;
BARRIER
ld.shared.b32 %r3, [%r5];
"""


def test_a_barrier_that_is_missing_is_a_race():
    came, races = run(EXCHANGE.replace("BARRIER", "bar.sync 0;"))
    np.testing.assert_array_equal(came, np.roll(X, 32))
    assert not races
    _, races = run(EXCHANGE.replace("BARRIER", ""))
    assert {kind for kind, _ in races} == {"read after write"}


def test_a_copy_lands_when_it_is_waited_for():
    copy = "cp.async.ca.shared.global [%r4], [%rd4], 4;\ncp.async.commit_group;"
    body = f"shl.b32 %r4, %r1, 2;\n{copy}\nWAIT\nld.shared.b32 %r3, [%r4];"
    np.testing.assert_array_equal(run(body.replace("WAIT", "cp.async.wait_group 0;"))[0], X)
    assert np.isnan(run(body.replace("WAIT", ""))[0]).all()


FAULTS = {
    "outside of all tensors": {"body": "mov.b32 %r3, %r2;", "size": 255},
    "a barrier that not all threads reach": {"body": "setp.gt.s32 %p1, %r1, 40;\n@%p1 bar.sync 0;"},
    "of shared memory": {"body": "shl.b32 %r4, %r1, 2;\nst.shared.b32 [%r4], %r2;", "room": 252},
    "is no multiple of 4": {"body": "add.s32 %r4, %r1, 1;\nst.shared.b32 [%r4], %r2;"},
    "no instruction frobnicate.b32 is known": {"body": "frobnicate.b32 %r3, %r2;"},
}


@pytest.mark.parametrize("told", FAULTS)
def test_what_no_kernel_may_do_is_a_fault(told):
    with pytest.raises(Fault, match=told):
        run(**FAULTS[told])


@pytest.fixture(scope="module")
def emulated():
    """One process does it all, without the interpreter, which other tests need from the start."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
def test_kernels_as_compiled_for_a_card_are_right(emulated):
    assert len(emulated["rows"]) == 5
    assert not {name: row["red"] for name, row in emulated["rows"].items() if "red" in row}
    assert all(0 < max(row["errors"]) < 0.01 for row in emulated["rows"].values())


def test_faults_are_beyond_what_roundings_do(emulated):
    """A product with a single column, a mask's stride, one of its keys, scores that are 3 % too large."""
    assert emulated["faults"] == dict.fromkeys(emulated["faults"], True)
    assert len(emulated["faults"]) == 4


def test_barriers_and_waits_left_out_are_noticed(emulated):
    """All but one wait, probably that after the loop, when nothing is under way any more."""
    unnoticed = [where for where, noticed in emulated["waits"] if not noticed]
    assert len(emulated["waits"]) == 11
    assert [where.partition(": ")[2].split()[0] for where in unnoticed] == ["cp.async.wait_group"]
