"""A small experiment with pooled heads: the sum over keys beside mean and maximum, and one network for each query.

    nice -n 10 python benchmarks/pooling.py [--folder runs/pooling] [--seeds 1 2]      writes docs/results/pooling.json

What is compared was written down before the first run: docs/results/pooling.md.  Give the same command again to resume:
finished runs are skipped, begun ones continue exactly.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from polyhead.config import Hyla, Pooled, Run, Train
from polyhead.papers.hyla.singles import fuzzy_model
from polyhead.tasks import FuzzyLogic
from polyhead.train import evaluate, load_model, run
from polyhead.train.store.folder import environment, write

PLACE = Path(__file__).parents[1] / "docs" / "results" / "pooling.json"
SIZE = {"dim": 2, "value_dim": 2}
HEADS = {
    "sum": Hyla(8, **SIZE),
    "mean": Pooled(8, **SIZE, pool="mean"),
    "max": Pooled(8, **SIZE, pool="max"),
    "query": Pooled(8, **SIZE, pool="mean", network="query"),
}
SPLITS = ("iid", "compositional")
LENGTHS = (16, 32)
"""Of the examples in training, and twice as many."""


def training(name: str, seed: int, steps: int = 2000) -> Run:
    """A network of the paper's kind, half as wide, on functions of three variables."""
    task = FuzzyLogic(variables=3, terms=2, length=LENGTHS[0], held_out=0.5, split="covered", split_seed=seed)
    train = Train(
        steps=steps, batch_size=64, lr=3e-3, evaluate=SPLITS, eval_batches=32, eval_every=steps, save_every=250
    )
    model = fuzzy_model(task, HEADS[name], dim=64, hidden=128)
    return Run(name=f"{name}-{seed}", task=task, model=model, train=train, seed=seed, threads=1)


def scored(one: Run, folder: Path) -> dict[str, dict[str, float]]:
    """R² and its sampling error by split and length of the examples."""
    run(replace(one, folder=str(folder)), resume=True)
    (_, model), found = load_model(folder), {}
    for length in LENGTHS:
        task = replace(one.task, length=length)
        for split in SPLITS:
            scores = evaluate(model, task, split, batches=64, batch_size=64, seed=one.seed)
            found[f"{split}, {length}"] = {name: round(scores[name], 4) for name in ("r2", "r2_se")}
    return found


def main() -> None:
    """Train and score all runs, seed by seed, and write what is finished after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/pooling"))
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = {}
    for seed in given.seeds:
        for name in HEADS:
            one = training(name, seed, given.steps)
            runs[one.name] = scored(one, given.folder / one.name)
            print(one.name, runs[one.name], flush=True)
            where = environment(torch.device("cpu"))
            record = {"command": "python benchmarks/pooling.py", "environment": where, "steps": given.steps, "r2": runs}
            write(PLACE, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
