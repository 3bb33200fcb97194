"""What the trainer costs beside a bare PyTorch loop, on the fuzzy-logic model.

    python benchmarks/speed/trainer.py [--recipes fuzzy-softmax fuzzy-hyla] [--pairs 20] [--steps 20] [--json FILE]

Both train the recipe's own model at its own size from the same parameters on the same batches; the bare loop is what
one writes: a learning rate, a batch, zero_grad, the model, the mean squared error, backward, fused AdamW, and the loss
now and then.  The trainer's is `Loop.fit`, in earnest: checks, dropout's seed, scaler, metrics, a row of metrics.jsonl
every --steps steps.  Not in it: evaluations and checkpoints, which a bare loop would have to make, too.

A pair is --steps steps of each, T B B T T B B T; figures are CPU time of the process on one thread.  The overhead is
the median over pairs of ours / bare - 1 with a 95 % interval (order statistics).  Losses must be equal at the end.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F
from training import median_interval

from polyhead.config import Run, stream
from polyhead.models.build import build
from polyhead.papers.recipes import RECIPES
from polyhead.timing.measure import machine
from polyhead.train import fast_products, optimiser
from polyhead.train.loop import alone
from polyhead.train.stop import StopSignals

WARM = 2
"""Pairs that do not count."""


class Bare:
    """The loop one writes."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(stream(run.seed, "init"))
        self.run, self.model, self.step, self.losses = run, build(run.model), 0, []
        decays = optimiser.is_decayed(self.model, run.train.decay)
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for name, p in named if decays[name]], "weight_decay": run.train.weight_decay},
            {"params": [p for name, p in named if not decays[name]], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=run.train.betas, eps=run.train.eps, fused=True)

    def steps(self, count: int) -> None:
        task, train = self.run.task, self.run.train
        for _ in range(count):
            for group in self.adamw.param_groups:
                group["lr"] = optimiser.learning_rate(self.step, train)
            batch = task.batch("train", train.batch_size, seed=self.run.seed, step=self.step)
            self.adamw.zero_grad(set_to_none=True)
            outputs = self.model(batch.inputs, tail=task.tail)
            loss = F.mse_loss(outputs, batch.targets[:, -task.tail :])
            loss.backward()
            self.adamw.step()
            self.step += 1
        self.losses.append(loss.item())


class Turns:
    """Told of every step of the trainer, it lets the bare loop take its turns and notes what each took."""

    def __init__(self, bare: Bare, steps: int) -> None:
        self.bare, self.each, self.step = bare, steps, 0
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.began = time.process_time()

    def __call__(self) -> None:
        self.step += 1
        if self.step % self.each != 1 or self.step == 1:  # what is logged after a step belongs to it
            return
        self.ours.append(time.process_time() - self.began)
        if len(self.ours) % 2:
            self.theirs += [seconds(lambda: self.bare.steps(self.each)) for _ in range(2)]
        self.began = time.process_time()


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str, pairs: int, steps: int) -> dict[str, Any]:
    run = RECIPES[name]()
    assert isinstance(run, Run)
    whole = 2 * -(-(pairs + WARM) // 2) * steps + 1  # the last turn is noticed at the step after it
    train = replace(run.train, log_every=steps, eval_every=10**9, save_every=10**9)
    run = replace(run, train=train, device="cpu")
    last = replace(run, train=replace(train, steps=whole, warmup=min(train.warmup, whole - 1), evaluate=()))
    with tempfile.TemporaryDirectory() as folder:
        bare = Bare(last)
        loop = alone(last, pathlib.Path(folder), torch.device("cpu"), False)
        loop.progress.step = turns = Turns(bare, steps)  # type: ignore[method-assign]
        loop.fit(StopSignals())
        loop.close()
        rows = [
            json.loads(line)
            for line in (pathlib.Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    logged = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    torch.testing.assert_close(
        [logged[(i + 1) * steps] for i in range(len(bare.losses))], bare.losses, rtol=1e-4, atol=1e-6
    )
    ours, theirs = ([x / steps for x in found[WARM:]] for found in (turns.ours, turns.theirs))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    median, low, high = median_interval(ratios)
    found = {"recipe": name, "pairs": len(ratios), "steps": steps, "overhead": median - 1, "low": low - 1}
    return found | {"high": high - 1, "ours": statistics.median(ours), "bare": statistics.median(theirs)}


def main() -> None:
    """Print the figures, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["fuzzy-softmax", "fuzzy-hyla"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in options.recipes:
        row = measure(name, options.pairs, options.steps)
        found.append(row)
        print(
            f"{name:14} trainer {row['ours'] * 1e3:6.2f} ms  bare {row['bare'] * 1e3:6.2f} ms  overhead "
            f"{row['overhead']:+.2%} [{row['low']:+.2%}, {row['high']:+.2%}]  ({row['pairs']} pairs)",
            flush=True,
        )
    if options.json:
        text = json.dumps({"environment": machine(torch.device("cpu")), "rows": found}, indent=1)
        pathlib.Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    with fast_products():
        main()
