"""HYLA by tiles against the reference, on one CPU thread: memory and time, forward and backward.

    python benchmarks/speed/hyla.py --t 2048 --json hyla.json
    python benchmarks/speed/hyla.py --growth                  # memory of tiles at t 8192 and 16384 as well: minutes

Memory is the growth of the peak resident size of a fresh process during forward and backward.  Time is process CPU
time, the minimum of interleaved repeats.  Nothing is timed unless both impls agree.
"""

import argparse
import json
import multiprocessing
import pathlib
import platform
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

from polyhead import ops
from polyhead.train import fast_products

IMPLS = ("reference", "blocked")
GROWTH = 2.2
"""Memory of tiles at twice the length, over that at the length, at most."""
TARGETS = {"memory": 40.0, "forward": 4.0, "forward+backward": 2.5}


def arguments(options: argparse.Namespace, t: int | None = None) -> list[Tensor]:
    """q, k and v."""
    torch.manual_seed(0)
    size = (options.b, t or options.t, options.h, options.d)
    return [torch.randn(size, requires_grad=True) for _ in range(3)]


def forward(impl: str, qkv: list[Tensor], options: argparse.Namespace) -> Tensor:
    """One forward pass that keeps nothing."""
    with torch.no_grad():
        return ops.hyla(*qkv, causal=not options.full, impl=impl)


def both(impl: str, qkv: list[Tensor], options: argparse.Namespace) -> list[Tensor]:
    """Output and gradients."""
    out = ops.hyla(*qkv, causal=not options.full, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, qkv, torch.ones_like(out))]


def check(options: argparse.Namespace) -> None:
    """Refuse to time what is wrong."""
    for t in (1, 50, 257):
        qkv = arguments(options, t)
        for x, y in zip(both("blocked", qkv, options), both("reference", qkv, options), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def peak(impl: str, options: argparse.Namespace, t: int) -> float:
    """Growth of the peak resident size, in MiB, in a process of its own."""
    torch.set_num_threads(1)
    both(impl, arguments(options, 64), options)  # what a first call loads is not the op's memory
    qkv = arguments(options, t)
    before = high_water()
    both(impl, qkv, options)
    return (high_water() - before) / 1024


def high_water() -> int:
    """Peak resident size in KiB.  Linux's ru_maxrss remembers the parent's peak even across exec; VmHWM does not."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return next(
            int(line.split()[1]) for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM")
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)


def apart(call: Callable[..., float], *given: object) -> float:
    """What a call returns in a process of its own.  Raises BrokenProcessPool if that dies, as of too much memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(call, *given).result()


def times(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Least CPU seconds per kind and impl; the impls take turns."""
    qkv = arguments(options)
    seconds: dict[str, dict[str, list[float]]] = {
        kind: {impl: [] for impl in IMPLS} for kind in ("forward", "forward+backward")
    }
    for repeat in range(options.repeats + 1):
        for impl in IMPLS:
            for kind, run in (("forward", forward), ("forward+backward", both)):
                start = time.process_time()
                run(impl, qkv, options)
                if repeat:  # the first round warms up
                    seconds[kind][impl].append(time.process_time() - start)
    return {kind: {impl: min(s) for impl, s in of.items()} for kind, of in seconds.items()}


def main() -> None:
    """Print the table, write the JSON, and fail if a target is missed at the size the targets are for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("b", 1), ("h", 8), ("d", 64), ("t", 2048), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--growth", action="store_true", help="memory of tiles at t 8192 and 16384, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    check(options)
    rows = {"memory": {impl: apart(peak, impl, options, options.t) for impl in IMPLS}, **times(options)}
    print(
        f"HYLA b {options.b} h {options.h} d {options.d} t {options.t} {'full' if options.full else 'causal'} float32"
    )
    print(f"{'':18}{'reference':>12}{'blocked':>12}{'ratio':>9}{'target':>9}")
    for name, row in rows.items():
        unit, scale = ("MiB", 1) if name == "memory" else ("ms", 1e3)
        row["ratio"] = row["reference"] / max(row["blocked"], 1e-9)
        ref, own = (f"{row[impl] * scale:.1f} {unit}" for impl in IMPLS)
        print(f"{name:18}{ref:>12}{own:>12}{row['ratio']:8.1f}x{TARGETS[name]:8.1f}x")
    missed = [name for name in TARGETS if rows[name]["ratio"] < TARGETS[name]]
    if options.growth:
        short, long = (apart(peak, "blocked", options, t) for t in (8192, 16384))
        rows["growth"] = {"8192": short, "16384": long, "ratio": long / short}
        print(f"tiles, t 8192 {short:.1f} MiB, t 16384 {long:.1f} MiB: {long / short:.2f}x, target {GROWTH}x")
        missed += ["growth"] if long / short > GROWTH else []
    if options.json:
        where = {"torch": torch.__version__, "platform": platform.platform(), "threads": 1}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "rows": rows, "environment": where}, file, indent=2)
    if options.t >= 2048 and not options.full and missed:
        raise SystemExit(f"targets are missed: {', '.join(missed)}")


if __name__ == "__main__":
    with fast_products():
        main()
