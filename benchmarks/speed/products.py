"""Training steps of recipes with oneDNN's float32 products beside PyTorch's own, on one CPU thread.

    python benchmarks/speed/products.py --json products.json

The steps are the trainer's own: batch, forward, backward, AdamW.  Two models of one seed take turns, so that all ratios
are within one process; time is process CPU time.  The losses of both are shown after the last step.  Where the check of
`polyhead.train.fast_products` refuses, it says why, and there is nothing to compare; `--force` turns the switch all the
same, for a look at what was refused.  It exits with 1 if a recipe is slower by more than 3 %, and not by chance, or if
losses part.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
from training import median_interval

from polyhead.config import Run
from polyhead.papers.recipes import RECIPES
from polyhead.timing.measure import machine
from polyhead.train import products
from polyhead.train.loop import Loop, alone
from polyhead.train.products import Products

NAMES = [f"{task}-{heads}" for task in ("fuzzy", "sraven", "lm") for heads in ("softmax", "linear", "hyla")]
WARM = 2
SLOWER, APART = 0.97, 1e-3


def step(loop: Loop, kind: Products) -> tuple[float, float]:
    """Seconds and loss of an update with these products."""
    with products.using(kind):
        start = time.process_time()
        loop._update()
        return time.process_time() - start, loop.networks.seen[-1][0].item()


def measure(name: str, kinds: dict[str, Products], pairs: int) -> dict[str, Any]:
    run = RECIPES[name]()
    assert isinstance(run, Run)
    run = replace(run, device="cpu")
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in kinds}
    with tempfile.TemporaryDirectory() as folder:
        loops = {}
        for side in kinds:
            where = pathlib.Path(folder) / side
            where.mkdir()
            loops[side] = alone(run, where, torch.device("cpu"), False)
        for turn in range(WARM + pairs):
            for side in sorted(kinds, reverse=bool(turn % 2)):  # nobody always comes second
                found[side].append(step(loops[side], kinds[side]))
        for loop in loops.values():
            loop.close()
    times = {side: [seconds for seconds, _ in steps[WARM:]] for side, steps in found.items()}
    ratio, low, high = median_interval([a / b for a, b in zip(times["stock"], times["fast"], strict=True)])
    losses = {side: steps[-1][1] for side, steps in found.items()}
    row = {"recipe": name, "steps": WARM + pairs, "ratio": ratio, "low": low, "high": high, "loss": losses}
    fastest = {side: min(own) for side, own in times.items()}
    middle = {side: statistics.median(own) for side, own in times.items()}
    return row | {"seconds": fastest, "median": middle, "fastest": fastest["stock"] / fastest["fast"]}


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=NAMES)
    parser.add_argument("--pairs", type=int, default=14, help="steps of each side")
    parser.add_argument("--force", action="store_true", help="turn the switch whatever the check says")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = products.found()
    print(f"the check: {found}", flush=True)
    if not found and not options.force:
        return
    kinds = {"stock": Products(False, "one side"), "fast": Products(True, "the other side")}
    rows = []
    for name in options.recipes:
        rows.append(row := measure(name, kinds, options.pairs))
        ms = {side: f"{seconds * 1e3:8.1f}" for side, seconds in row["seconds"].items()}
        print(
            f"{name:15} stock {ms['stock']} ms  fast {ms['fast']} ms  {row['fastest']:.2f} times  median of pairs "
            f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]  loss {row['loss']['stock']:.7f} "
            f"{row['loss']['fast']:.7f}",
            flush=True,
        )
    if options.json:
        about = {"environment": machine(torch.device("cpu")), "check": str(found), "forced": options.force}
        pathlib.Path(options.json).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    parted = [row["recipe"] for row in rows if abs(row["loss"]["fast"] / row["loss"]["stock"] - 1) > APART]
    slower = [row["recipe"] for row in rows if row["ratio"] < SLOWER and row["high"] < 1]
    if parted or slower:
        raise SystemExit(f"losses part: {parted}; slower: {slower}")


if __name__ == "__main__":
    main()
