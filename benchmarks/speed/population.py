"""A population beside the same runs in sequence: both train the same steps in one process.

    python benchmarks/speed/population.py [--shape demo|paper|small] [--members 12] [--steps 20] [--repeats 5]
        [--mechanism softmax|linear|hyla] [--at-once N] [--device auto|cpu|cuda] [--compile] [--json FILE]

One repeat trains every member alone (`train.run`, one after the other) in one process, and all together
(`population.train`) in another, in turn first; both with the evaluation and the checkpoint that end a run.  Figures
are seconds per member on one thread, process CPU time and wall time, medians over repeats, and the ratio alone /
together (above 1: the population is faster) with its smallest and largest.  Starting Python once per single run, which
a population saves as well, is not counted.  On a CPU a population keeps freed memory; with MALLOC_TRIM_THRESHOLD_ and
MALLOC_MMAP_THRESHOLD_ set, both sides do.  Nothing is timed unless the losses agree first.
"""

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from polyhead.config import Hyla, Linear, Run, Softmax, Train
from polyhead.papers.hyla.singles import fuzzy_model
from polyhead.scale.population import training as population
from polyhead.tasks import FuzzyLogic
from polyhead.train import fast_products, run
from polyhead.train.store.folder import read_metrics

SHAPES = {
    "small": {"dim": 16, "hidden": 32, "head": 4, "batch": 16, "length": 16},
    "demo": {"dim": 64, "hidden": 128, "head": 8, "batch": 64, "length": 32},
    "paper": {"dim": 128, "hidden": 256, "head": 2, "batch": 128, "length": 32},
}
GROUPS = {"softmax": Softmax, "linear": Linear, "hyla": Hyla}
TOLERANCE = 1e-3
"""Largest relative difference between the first five losses of a member and those of the same run alone."""


def members(kind, options):
    size = SHAPES[options.shape]
    task = FuzzyLogic(length=size["length"])
    model = fuzzy_model(
        task, GROUPS[kind](8, dim=size["head"], value_dim=size["head"]), dim=size["dim"], hidden=size["hidden"]
    )
    train = Train(
        steps=options.steps,
        batch_size=size["batch"],
        clip=1.0,
        warmup=5,
        log_every=1000,
        evaluate=("iid",),
        eval_batches=1,
    )
    first = Run(task=task, model=model, train=train, threads=1, device=options.device, compile=options.compile)
    return [
        replace(
            first, name=f"m{i}", seed=i, train=replace(train, lr=1e-3 * (1 + i % 3), weight_decay=0.1 * (1 + i % 2))
        )
        for i in range(options.members)
    ]


def sequence(runs, folder):
    return [run(replace(one, folder=str(folder / one.name)), progress=False) for one in runs]


def together(runs, folder, at_once=None):
    return population.train(runs, folder, progress=False, at_once=at_once)


def clocks(function, runs):
    """Seconds per member of process CPU time and of wall time."""
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall = time.process_time(), time.perf_counter()
        function(runs, Path(folder))
        return (time.process_time() - cpu) / len(runs), (time.perf_counter() - wall) / len(runs)


def agree(runs, both):
    """Train five steps both ways and compare the losses."""
    short = [replace(one, train=replace(one.train, steps=5, log_every=1)) for one in runs]
    with tempfile.TemporaryDirectory() as folder:
        pairs = zip(sequence(short, Path(folder, "alone")), both(short, Path(folder, "together")), strict=True)
        for alone, member in pairs:
            losses = [
                [row["loss"] for row in read_metrics(x.folder) if row["kind"] == "train"] for x in (alone, member)
            ]
            worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
            if not worst < TOLERANCE:
                raise SystemExit(f"{member.name}: parity is red, nothing is timed: losses differ by {worst:.1e}")


def side(name, kind, options):
    """One side of a repeat, in a process of its own: what a population does to the allocator stays."""
    runs = members(kind, options)
    both = functools.partial(together, at_once=options.at_once)
    function = sequence if name == "alone" else both
    if name == "agree":
        return agree(runs, both)
    clocks(function, [replace(one, train=replace(one.train, steps=3)) for one in runs[:6]])
    return clocks(function, runs)


def child(name, kind):
    arguments = [sys.executable, __file__, *sys.argv[1:], "--side", name, "--mechanism", kind]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def measure(kind, options):
    child("agree", kind)
    times = []
    for i in range(options.repeats):
        order = ("alone", "together") if i % 2 else ("together", "alone")
        found = {name: child(name, kind) for name in order}
        times.append((found["alone"], found["together"]))
    row = {"mechanism": kind, "shape": options.shape, "members": options.members, "steps": options.steps}
    for i, clock in enumerate(("cpu", "wall")):
        ratios = sorted(alone[i] / both[i] for alone, both in times)
        row |= {
            f"{clock}_alone": statistics.median(alone[i] for alone, _ in times),
            f"{clock}_together": statistics.median(both[i] for _, both in times),
            f"{clock}_ratio": statistics.median(ratios),
            f"{clock}_low": ratios[0],
            f"{clock}_high": ratios[-1],
        }
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--mechanism", choices=GROUPS)
    parser.add_argument("--members", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="compile both")
    parser.add_argument("--json")
    parser.add_argument("--side", choices=("agree", "alone", "together"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side:
        print(json.dumps(side(options.side, options.mechanism, options)))
        return
    machine = platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {machine}, {options.shape} shape, {options.device}")
    rows = []
    for kind in [options.mechanism] if options.mechanism else GROUPS:
        row = measure(kind, options)
        rows.append(row)
        shown = "   ".join(
            f"{clock} {row[f'{clock}_alone']:.3f} s alone {row[f'{clock}_together']:.3f} s together, ratio "
            f"{row[f'{clock}_ratio']:.2f} [{row[f'{clock}_low']:.2f}, {row[f'{clock}_high']:.2f}]"
            for clock in ("cpu", "wall")
        )
        print(f"{kind:8s} {shown}  ({options.members} members, {options.steps} steps)", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    with fast_products():
        main()
