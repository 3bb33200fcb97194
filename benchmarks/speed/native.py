"""Native code beside stock softmax attention, tiles or chunks, and the reference: ratios of CPU time within one run.

    OMP_NUM_THREADS=1 python benchmarks/speed/native.py
    OMP_NUM_THREADS=1 python benchmarks/speed/native.py --recipes fuzzy-softmax sraven-hyla     # whole training steps
    POLYHEAD_NATIVE_FLAGS="-O3 -mavx2 -mfma" OMP_NUM_THREADS=1 python benchmarks/speed/native.py --json avx2.json

Those that are compared take turns; a figure is the median over the rounds of the ratio within a round, with the
smallest and the largest.  Nothing is timed unless native code agrees with the reference.
"""

import argparse
import itertools
import json
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.config import Run
from polyhead.ops.dispatch import resolve
from polyhead.ops.native import library
from polyhead.papers.recipes import RECIPES
from polyhead.train.loop import alone

CAUSAL = ((1, 512, 8, 64), (1, 2048, 8, 64), (1, 4096, 8, 64), (64, 64, 8, 32), (8, 256, 8, 32))
NARROW = ((128, 32, 8, 2), (128, 32, 8, 8), (128, 32, 8, 16), (16, 16, 8, 8))
"""b t h d: those of language models, beside stock attention; those of fuzzy logic, beside the reference."""

DECODING = ((1, 512, 8, 64), (1, 2048, 8, 64), (1, 4096, 8, 64), (8, 1024, 8, 64), (1, 2048, 8, 16))
"""b s h d: one query over so many keys, beside stock attention."""

SMALL = ((128, 32, 8, 2), (128, 32, 8, 8), (128, 32, 8, 16), (64, 128, 8, 8), (16, 256, 8, 8), (4, 512, 8, 8))
"""b t h d: softmax attention of small heads, beside stock attention."""

OPS = ("hyla", "relational", "linear", "softmax")


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def draw(op: str, b: int, t: int, s: int, h: int, d: int) -> list[Tensor]:
    """The tensors of an op; relations are 8, as wide as keys."""
    q, k, v = torch.randn(b, t, h, d), torch.randn(b, s, h, d), torch.randn(b, s, h, d)
    if op != "relational":
        return [q, k, v]
    return [q, k, torch.randn(b, t, 8, d), torch.randn(b, s, 8, d), v, torch.randn(h, d, 8) / 8**0.5]


def check(op: str) -> None:
    """Refuse to time what is wrong: output and gradients, causal, and with a bias where it takes one."""
    for t, causal in itertools.product((1, 50, 257), (True,) if op == "linear" else (True, False)):
        tensors = [x.requires_grad_() for x in draw(op, 2, t, 257, 8, 16)]
        bias = None if causal else torch.randn(8, t + 256, requires_grad=True)
        leaves, came = [*tensors, *([] if causal else [bias])], []
        for impl in ("native", "reference"):
            out = resolve(op, impl)(*tensors, bias=bias, causal=causal)
            came.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for x, y in zip(*came, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


def race(
    sides: dict[str, Callable[[], Tensor]], own: dict[str, list[Tensor]], leaves: list[Tensor], rounds: int
) -> dict[str, list[list[float]]]:
    """Seconds of each side in each round: [forward, forward and backward]; `own`: leaves of sides that have others."""

    def both(name: str, run: Callable[[], Tensor]) -> object:
        out = run()
        return torch.autograd.grad(out, own.get(name, leaves), torch.ones_like(out))

    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    for n in range(rounds + 1):
        for name, run in sides.items():
            with torch.no_grad():
                alone = seconds(run)
            took = [alone, seconds(lambda name=name, run=run: both(name, run))]
            if n:  # the first round warms up
                times[name].append(took)
    return times


def rows(op: str, size: tuple[int, ...], beside: str, rounds: int) -> list[dict[str, object]]:
    """One row a side, with ratios to the first of them."""
    b, t, s, h, d = size
    tensors, narrow = [x.requires_grad_() for x in draw(op, b, t, s, h, d)], beside == "reference"
    bias = torch.randn(h, 2 * t - 1, requires_grad=True) if narrow else None
    q, k, v = (x.detach().requires_grad_() for x in draw("hyla", b, t, s, h, d))

    def stock() -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=t == s).transpose(1, 2)

    def of(impl: str) -> Callable[[], Tensor]:
        return lambda: resolve(op, impl)(*tensors, bias=bias, causal=not narrow)

    others = {"linear": "chunked", "softmax": "sdpa"}.get(op, "blocked")
    sides = {"reference": of("reference")} if narrow else {"stock": stock}
    sides |= {impl: of(impl) for impl in ("reference" if t == 1 else others, "native")}
    leaves = {"stock": [q, k, v]}
    times = race(sides, leaves, [*tensors, *([] if bias is None else [bias])], rounds)
    first = next(iter(times.values()))
    found = []
    for name, mine in times.items():
        row: dict[str, object] = {"op": op, "b t s h d": size, "side": name}
        for place, what in enumerate(("forward", "forward and backward")):
            ratios = [x[place] / y[place] for x, y in zip(mine, first, strict=True)]
            row[what] = {
                "ms": round(1e3 * statistics.median(x[place] for x in mine), 2),
                "ratio": round(statistics.median(ratios), 2),
                "from": round(min(ratios), 2),
                "to": round(max(ratios), 2),
            }
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def steps(name: str, rounds: int) -> dict[str, object]:
    """Training steps of a recipe with native code, and their CPU time over that of steps without it."""
    run = RECIPES[name]()
    assert isinstance(run, Run)
    sources = {*map(library.source, OPS), "gelu"}
    reasons = dict.fromkeys(((source, torch.float32) for source in sources), "is left out")
    sides: dict[str, dict[tuple[str, torch.dtype], library.Function | str]] = {"with": {}, "without": {**reasons}}
    times: dict[str, list[float]] = {side: [] for side in sides}
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        loops = {}
        for side in sides:
            where = pathlib.Path(folder) / side
            where.mkdir()
            loops[side] = alone(replace(run, device="cpu"), where, torch.device("cpu"), False)
        for n in range(rounds + 2):
            for side in sorted(sides, reverse=bool(n % 2)):
                library._LIBRARIES = sides[side]
                took = seconds(loops[side]._update)
                losses[side] = loops[side].networks.seen[-1][0].item()
                times[side] += [took] if n > 1 else []  # the first two warm up
        for loop in loops.values():
            loop.close()
    ratios = [a / b for a, b in zip(times["with"], times["without"], strict=True)]
    ms = {side: round(1e3 * statistics.median(own), 1) for side, own in times.items()}
    spread = {"ratio": statistics.median(ratios), "from": min(ratios), "to": max(ratios)}
    return {"recipe": name, "ms": ms, **{key: round(x, 2) for key, x in spread.items()}, "loss": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS)
    parser.add_argument("--recipes", nargs="+", default=[], help="whole training steps of these, and nothing else")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for name in options.recipes:
        print(json.dumps(steps(name, options.rounds)), flush=True)
    if options.recipes:
        return
    found = []
    for op in options.ops:
        if (reason := library.missing(library.source(op))) is not None:
            raise SystemExit(f"native: {op} {reason}")
        check(op)
        longest = [size for size in (SMALL if op == "softmax" else CAUSAL) if size[1] <= options.longest]
        cases = [((b, t, t, h, d), "stock") for b, t, h, d in longest]
        if op != "linear":  # which decodes with a state, and takes no bias
            cases += [((b, 1, s, h, d), "stock") for b, s, h, d in DECODING]
            cases += [((b, t, t, h, d), "reference") for b, t, h, d in NARROW]
        found += [row for size, beside in cases for row in rows(op, size, beside, options.rounds)]
    if options.json:
        made = {"torch": torch.__version__, "processor": platform.processor(), "threads": options.threads}
        flags = library.flags(torch.float32)
        options.json.write_text(json.dumps({**made, "flags": flags, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
