"""The seven slices: each gives its items, in order of value."""

import argparse
import functools
import itertools
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import speed.lm_step
import speed.population
from card.case import DTYPES, Item, Setting, Shape, both, parity, rounding, tensors, timed
from polyhead.ops.dispatch import resolve
from polyhead.scale.population import training as population
from polyhead.timing.measure import matrix_rate
from polyhead.train import run as train

CAUSAL, RELU = ("causal", True), ("relation_act", "relu")
PLAIN = ("normalise", "identity"), ("act", "identity")
HYLA = Shape("hyla", options=(CAUSAL,))
RELATIONAL = Shape("relational", options=(CAUSAL, RELU))
LINEAR = Shape("linear", t=200, s=200, options=(CAUSAL,))

CASES = {
    "hyla": HYLA,
    "hyla, one query": replace(HYLA, t=1, s=300, mask=True),
    "hyla, strided mask, bias, window": replace(HYLA, d=32, mask=True, bias=True, options=(CAUSAL, ("window", 20))),
    "hyla, packed, groups": replace(HYLA, t=70, s=70, g=2, edges=(0, 0, 1, 30, 70), options=()),
    "hyla, softmax": replace(HYLA, d=32, options=(CAUSAL, ("normalise", "softmax"))),
    "hyla, identity, 16 heads": replace(HYLA, h=16, g=16, d=32, options=PLAIN),
    "hyla, short rows": replace(HYLA, d=16, t=33, s=61),
    "relational": RELATIONAL,
    **{f"relational, r {r}": replace(RELATIONAL, r=r, d=32) for r in (1, 2, 17, 33)},
    "relational, one query": replace(RELATIONAL, t=1, s=300, d=32, mask=True),
    "relational, one head": replace(RELATIONAL, h=1, g=1, r=1, d=16),
    "relational, by offset, bias": replace(RELATIONAL, d=32, by_offset=True, bias=True),
    "relational, strided mask, window, groups": replace(
        RELATIONAL, d=32, g=2, mask=True, options=(("window", 20), ("relation_act", "gelu"))
    ),
    "linear": LINEAR,
    "linear, groups": replace(LINEAR, h=4, g=2, d=128, t=150, s=170),
    "linear, packed": replace(LINEAR, edges=(0, 30, 70, 150, 200)),
    "linear, strided mask": replace(LINEAR, mask=True, d=16),
}
SMALL = {"b": 1, "t": 5, "s": 5, "h": 2, "g": 2, "d": 4, "r": 2}


def small(shape: Shape) -> Shape:
    """As short as it can be, for the interpreter."""
    sizes = dict(SMALL, t=1 if shape.t == 1 else 5)
    return replace(shape, **sizes, edges=(0, 2, 5) if shape.edges else ())


def slice_1(setting: Setting) -> Iterator[Item]:
    """Parity, and what a first call takes."""
    dry = "hyla", "relational, r 1", "linear"
    for kind, (name, shape) in itertools.product(DTYPES, CASES.items()):
        if setting.dry and (name not in dry or kind != ("tf32" if name == "linear" else "fp32")):
            continue
        if shape.op == "hyla" and kind in ("fp32", "tf32"):
            shape = replace(shape, d=min(shape.d, 32), h=min(shape.h, 8), g=min(shape.g, 8))
        shape = small(shape) if setting.dry else shape
        yield Item(f"{name}, {kind}", functools.partial(parity, shape, kind, setting))


def ragged(op: str, setting: Setting) -> Item:
    """A small case with tiles that are not full."""
    shape = small(CASES[op]) if setting.dry else replace(CASES[op], t=37, s=45)
    return Item(op, functools.partial(parity, shape, "fp32" if setting.dry else "bf16", setting))


RAGGED = {op: functools.partial(ragged, op) for op in ("hyla", "relational", "linear")}
"""One of each op, for a process of its own."""


def slice_2(setting: Setting) -> Iterator[Item]:
    """What compute-sanitizer says."""
    tools = ("memcheck",) if setting.dry else ("memcheck", "racecheck", "initcheck")
    for op, tool in itertools.product(RAGGED, tools):
        yield Item(f"{op}, {tool}", functools.partial(sanitised, op, tool, setting))


def sanitised(op: str, tool: str, setting: Setting) -> dict[str, Any]:
    """Its last lines; red if it found errors."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        return {"skipped": "compute-sanitizer is not installed"}
    script = str(pathlib.Path(__file__).parents[1] / "on_card.py")
    words = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, script, "--one", op]
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=300)
    row: dict[str, Any] = {"code": done.returncode, "tail": (done.stdout + done.stderr).splitlines()[-3:]}
    return row | ({"red": [done.returncode], "inputs": None} if done.returncode else {})


Calls = dict[str, Callable[[], object]]


def ways(shape: Shape, kind: str, impls: tuple[str, ...], which: str, setting: Setting) -> Calls:
    """Calls of impls, and of stock attention, forward or with gradients."""
    made, options = tensors(shape, DTYPES[kind], setting.device)
    dout = torch.ones_like(made[0]) if which == "both" else None

    def plain(impl: str) -> Callable[[], object]:
        def call() -> object:
            with torch.set_grad_enabled(dout is not None):
                return both(shape.op, impl, made, options, dout)

        return call

    calls = {impl: plain(impl) for impl in impls}
    q, k, v = (x.transpose(1, 2) for x in (made[0], made[1], made[-1] if shape.op != "relational" else made[4]))

    def stock() -> object:
        with torch.set_grad_enabled(dout is not None):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=shape.t > 1, enable_gqa=shape.h != shape.g)
            leaves = [made[0], made[1], made[-1] if shape.op != "relational" else made[4]]
            return out if dout is None else torch.autograd.grad(out, leaves, dout.transpose(1, 2))

    return calls | {"stock": stock}


def sweep(base: Shape, lengths: tuple[int, ...], impls: tuple[str, ...], kind: str, setting: Setting) -> Iterator[Item]:
    """Forward and with gradients, over lengths."""
    for t, which in itertools.product(lengths, ("forward", "both")):
        shape = small(base) if setting.dry else replace(base, b=8, t=t, s=t)
        kept = tuple(impl for impl in impls if impl != "reference" or t <= 2048)
        name = f"{base.op} d {base.d}, t {t}, {kind}, {which}"
        yield Item(name, functools.partial(turns, shape, kind, kept, which, setting))


def turns(shape: Shape, kind: str, impls: tuple[str, ...], which: str, setting: Setting) -> dict[str, Any]:
    with rounding(kind):
        where = {"op": shape.op, "b": shape.b, "t": shape.t, "s": shape.s, "d": shape.d, "dtype": kind, "pass": which}
        return where | timed(ways(shape, kind, impls, which, setting), setting)


def slice_3(setting: Setting) -> Iterator[Item]:
    """HYLA beside its reference and stock attention."""
    yield Item("plain product, bf16", lambda: {"tflops": matrix_rate(setting.device)})
    lengths = (16,) if setting.dry else (2048, 512, 1024, 4096, 8192)
    kind, impls = ("fp32", ("triton", "reference")) if setting.dry else ("bf16", ("triton", "blocked", "reference"))
    for d in (64,) if setting.dry else (64, 32):
        yield from sweep(replace(HYLA, d=d), lengths, impls, kind, setting)


def slice_4(setting: Setting) -> Iterator[Item]:
    """The other ops, and decoding: one query, many keys."""
    lengths, kind = ((16,), "fp32") if setting.dry else ((2048, 512, 4096), "bf16")
    yield from sweep(replace(RELATIONAL, d=64), lengths, ("triton", "blocked", "reference"), kind, setting)
    yield from sweep(LINEAR, lengths, ("triton", "chunked", "reference"), kind, setting)
    for op, s, b in itertools.product(("hyla", "relational"), (4096, 32768), (8, 1, 64)):
        base = HYLA if op == "hyla" else RELATIONAL
        shape = replace(small(base) if setting.dry else base, b=1 if setting.dry else b, t=1, s=9 if setting.dry else s)
        key = f"decode {op}, b {b}, s {s}"
        yield Item(key, functools.partial(turns, shape, kind, ("triton", "blocked"), "forward", setting))
        if setting.dry:
            return


def slice_5(setting: Setting) -> Iterator[Item]:
    """A whole training step; an op in a CUDA graph."""
    size = dict(speed.lm_step.SMALLER if setting.dry else speed.lm_step.LARGE)
    if setting.dry:
        size |= {"tokens": 16, "contexts": (16,), "layers": 1, "dim": 16, "heads": 2}
    for compile_, context in itertools.product((False,) if setting.dry else (False, True), size["contexts"]):
        options = argparse.Namespace(device=setting.device, precision=None, compile=compile_, repeats=setting.repeats)
        key = f"step, context {context}{', compiled' * compile_}"
        yield Item(key, functools.partial(step, context, size, options))
    yield Item("hyla in a CUDA graph", functools.partial(graphed, setting))


def step(context: int, size: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """HYLA heads beside softmax heads."""
    return {"rows": speed.lm_step.measure(context, size, options)}


def graphed(setting: Setting) -> dict[str, Any]:
    """Whether an op that is recorded gives what it gives without, and how long either takes."""
    if setting.device.type != "cuda":
        return {"skipped": "takes a card"}
    (q, k, v), options = tensors(replace(HYLA, b=8, t=512, s=512), torch.bfloat16, setting.device)
    run = functools.partial(resolve("hyla", "triton"), q.detach(), k.detach(), v.detach(), **options)
    wanted, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        came = run()
    graph.replay()
    torch.cuda.synchronize()
    return {"equal": bool((came == wanted).all())} | timed({"eager": run, "graph": graph.replay}, setting)


def slice_6(setting: Setting) -> Iterator[Item]:
    """Runs of fuzzy logic at the paper's sizes, all in one process, beside one alone."""
    for kind in ("hyla", "softmax"):
        for count in (1, 2) if setting.dry else (1, 64):
            yield Item(f"population of {count}, {kind}", functools.partial(grown, kind, count, setting))


def grown(kind: str, count: int, setting: Setting) -> dict[str, Any]:
    """Milliseconds of a step of all, without those of a short training; one before has what a process does once."""
    first, *steps = (1, 1, 2) if setting.dry else (20, 20, 220)
    options = argparse.Namespace(shape="small" if setting.dry else "paper", members=count, compile=False, steps=0)
    options.device = str(setting.device)
    taken = []
    for step in (first, *steps):
        options.steps = step
        runs = speed.population.members(kind, options)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            if count == 1:
                train(replace(runs[0], folder=f"{folder}/alone"), progress=False)
            else:
                population.train(runs, folder, progress=False)
            taken.append(time.perf_counter() - start)
    each = (taken[2] - taken[1]) / (steps[1] - steps[0])
    return {"members": count, "mechanism": kind, "ms_a_step": each * 1e3, "ms_a_step_and_member": each * 1e3 / count}


def slice_7(setting: Setting) -> Iterator[Item]:
    """float32, where kernels are the default for short rows only: tiles, and the reference as the compiler makes it."""
    lengths = (16,) if setting.dry else (512, 1024, 2048)
    shapes = (HYLA,) if setting.dry else (replace(HYLA, d=16), HYLA, replace(RELATIONAL, d=32), LINEAR)
    for base, kind in itertools.product(shapes, ("fp32",) if setting.dry else ("fp32", "tf32")):
        yield from sweep(base, lengths, ("triton", "blocked", "reference"), kind, setting)
        yield Item(f"{base.op} d {base.d}, compiled, {kind}", functools.partial(compiled, base, kind, setting))


def compiled(base: Shape, kind: str, setting: Setting) -> dict[str, Any]:
    """The compiled reference beside the kernels, at one length."""
    shape = small(base) if setting.dry else replace(base, b=8, t=1024, s=1024)
    with rounding(kind), torch.no_grad():
        made, options = tensors(shape, DTYPES[kind], setting.device)
        reference = resolve(shape.op, "reference")
        backend = "eager" if setting.dry else "inductor"
        fast = torch.compile(lambda *x: reference(*x, **options), dynamic=False, backend=backend)
        calls = {"compiled": lambda: fast(*made), "triton": lambda: resolve(shape.op, "triton")(*made, **options)}
        return {"op": shape.op, "t": shape.t, "pass": "forward", "dtype": kind} | timed(calls, setting)


SLICES = {1: slice_1, 2: slice_2, 3: slice_3, 4: slice_4, 5: slice_5, 6: slice_6, 7: slice_7}
