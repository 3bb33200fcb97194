"""HYLA by native code beside stock softmax attention, tiles and the reference: ratios of CPU time within one run.

    OMP_NUM_THREADS=1 python benchmarks/bench_native.py
    POLYHEAD_NATIVE_FLAGS="-O3 -mavx2 -mfma" OMP_NUM_THREADS=1 python benchmarks/bench_native.py --json avx2.json

Those that are compared take turns; a figure is the median over the rounds of the ratio within a round, with the
smallest and the largest.  Nothing is timed unless native code agrees with the reference.
"""

import argparse
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead import ops
from polyhead.ops.native import library

CAUSAL = ((1, 512, 8, 64), (1, 2048, 8, 64), (1, 4096, 8, 64), (64, 64, 8, 32), (8, 256, 8, 32))
NARROW = ((128, 32, 8, 2), (128, 32, 8, 8), (128, 32, 8, 16), (16, 16, 8, 8))
"""b t h d: those of language models, beside stock attention; those of fuzzy logic, beside the reference."""


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def check() -> None:
    """Refuse to time what is wrong."""
    for t in (1, 50, 257):
        q, k, v = torch.randn(3, 2, t, 8, 16)
        came, wanted = (ops.hyla(q, k, v, causal=True, impl=impl) for impl in ("native", "reference"))
        torch.testing.assert_close(came, wanted, rtol=1e-4, atol=1e-5)


def race(sides: dict[str, Callable[[], Tensor]], leaves: list[Tensor], rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each side in each round: [forward, forward and backward]."""

    def both(run: Callable[[], Tensor]) -> object:
        out = run()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    for n in range(rounds + 1):
        for name, run in sides.items():
            with torch.no_grad():
                alone = seconds(run)
            took = [alone, seconds(lambda run=run: both(run))]
            if n:  # the first round warms up
                times[name].append(took)
    return times


def rows(size: tuple[int, ...], narrow: bool, rounds: int) -> list[dict[str, object]]:
    """One row a side, with ratios to the first of them."""
    b, t, h, d = size
    q, k, v = (torch.randn(b, t, h, d, requires_grad=True) for _ in range(3))
    bias = torch.randn(h, 2 * t - 1, requires_grad=True) if narrow else None

    def stock() -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    def of(impl: str) -> Callable[[], Tensor]:
        return lambda: ops.hyla(q, k, v, bias=bias, causal=not narrow, impl=impl)

    sides = {"reference": of("reference")} if narrow else {"stock": stock}
    sides |= {"blocked": of("blocked"), "native": of("native")}
    times = race(sides, [q, k, v, *([] if bias is None else [bias])], rounds)
    first = next(iter(times.values()))
    found = []
    for name, mine in times.items():
        row: dict[str, object] = {"b t h d": size, "side": name}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if (reason := library.missing("hyla")) is not None:
        raise SystemExit(f"bench_native: hyla {reason}")
    check()
    found = [row for size in CAUSAL if size[1] <= options.longest for row in rows(size, False, options.rounds)]
    found += [row for size in NARROW for row in rows(size, True, options.rounds)]
    if options.json:
        made = {"torch": torch.__version__, "processor": platform.processor(), "threads": options.threads}
        flags = library.flags(torch.float32)
        options.json.write_text(json.dumps({**made, "flags": flags, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
