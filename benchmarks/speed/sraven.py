"""Symbolic Raven on one CPU thread: instances a second drawn, and examined for ambiguity.

    python benchmarks/speed/sraven.py --json sraven.json

Time is process CPU time, the best of the repeats.  Nothing is timed unless the independent checker finds the instances
in order.  The target is 100 000 instances a second of `sample("train")` at 4 features and 8 values, in batches of 1024.
"""

import argparse
import json
import pathlib
import platform
import sys
import time
from collections.abc import Callable

import torch

from polyhead.tasks import Sraven
from polyhead.tasks.sraven.ambiguity import ambiguous, bayes

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "support"))
from sraven_rules import violations

BATCHES = (128, 1024, 8192)
TARGET = 100_000.0


def rate(run: Callable[[], object], count: int, repeats: int) -> float:
    """Instances a second of CPU time, where a run makes `count`; about 32 768 a repeat."""
    times = max(1, 32_768 // count)
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(times):
            run()
        best = min(best, time.process_time() - start)
    return count * times / best


def main() -> None:
    """Print the table, write the JSON, and fail if the target is missed at the size it is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("features", 4), ("values", 8), ("grid", 3), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = Sraven(options.features, options.values, options.grid)
    latents = task.batch("train", 1000, seed=0, step=0).latents
    if violations(latents["panels"], latents["rules"], latents["permutations"], values=task.values):
        raise SystemExit("the instances break their rules")
    generator = torch.Generator().manual_seed(0)
    rows = {
        f"sample, batch {size}": rate(lambda size=size: task.sample("train", size, generator), size, options.repeats)
        for size in BATCHES
    }
    panels = task.batch("train", 1024, seed=0, step=0).latents["panels"]
    for definition in ("code", "text"):
        run = lambda name=definition: ambiguous(panels, task, name)  # noqa: E731
        rows[f"ambiguous, {definition}"] = rate(run, 1024, options.repeats)
    rows["bayes"] = rate(lambda: bayes(panels, task), 1024, options.repeats)
    print(f"SRAVEN features {task.features} values {task.values} grid {task.grid}, one thread")
    for name, value in rows.items():
        print(f"{name:24}{value:12,.0f} instances/s")
    if options.json:
        where = {"torch": torch.__version__, "platform": platform.platform(), "threads": 1}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "rows": rows, "environment": where}, file, indent=2)
    if (task.features, task.values, task.grid) == (4, 8, 3) and rows["sample, batch 1024"] < TARGET:
        raise SystemExit("the target is missed")


if __name__ == "__main__":
    main()
