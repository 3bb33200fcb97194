"""Training steps of the papers' models beside the plainest eager PyTorch network of the same shape, in one run.

    python benchmarks/speed/training.py [--pairs 20] [--shape paper|demo|sraven] [--compile] [--whole] [--equal]
                                        [--json FILE]

Both networks train on the same batches from the same initial parameters, each in a process of its own; a pair is one
step of each, in alternating order, while the other one waits.  Figures are process CPU time per step on one thread:
median over pairs, and the ratio plain / ours with a 95 % interval of the median (order statistics).  Nothing is timed
unless both networks give the same loss first.

Ours is as the trainer has it: the last layer is computed only where the task scores (`--whole` switches that off),
matrix products are `polyhead.train.fast_products`, and the process keeps the memory that it frees.  The plain network
has PyTorch as it comes; with `--equal`, it has our products and memory, too.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import platform
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from polyhead.config import Hyla, Linear, Softmax, Train
from polyhead.models.transformer import Transformer
from polyhead.papers.hyla.singles import fuzzy_model
from polyhead.papers.recipes import RECIPES
from polyhead.tasks import FuzzyLogic
from polyhead.train import fast_products
from polyhead.train.device import keep_memory
from polyhead.train.evaluation import predict
from polyhead.train.optimiser import build, learning_rate

SHAPES = {
    "paper": {"dim": 128, "hidden": 256, "head": 2, "batch": 128},
    "demo": {"dim": 64, "hidden": 128, "head": 8, "batch": 64},
    "sraven": {"batch": 128},
}
"""Fuzzy logic as in the HYLA paper and smaller, and the paper's SRAVEN (four layers, 16 heads of width 4)."""

SPAWN = multiprocessing.get_context("spawn")
WARM = 5

GROUPS = {"softmax": Softmax, "linear": Linear, "hyla": Hyla}


class PlainAttention(nn.Module):
    """What one writes down first: three projections, einsum, the paper's equation."""

    def __init__(self, kind, dim, heads, head_dim, length):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.q = nn.Linear(dim, heads * head_dim)
        self.k = nn.Linear(dim, heads * head_dim)
        self.v = nn.Linear(dim, heads * head_dim)
        self.out = nn.Linear(heads * head_dim, dim)
        self.table = nn.Parameter(torch.randn(heads, length) * length**-0.5)
        i = torch.arange(length)
        self.register_buffer("buckets", buckets((i[:, None] - i).clamp(min=0), length))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5 + self.table[:, self.buckets]
        if self.kind == "softmax":
            out = torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v)
        elif self.kind == "linear":
            out = torch.einsum("bhts,bshe->bthe", scores, v)
        else:
            code = scores / (scores.square().mean(1, keepdim=True) + 1e-6).sqrt()
            hidden = torch.einsum("bhts,bshe->btse", code, v).relu()
            out = torch.einsum("bhts,btse->bthe", code, hidden)
        return self.out(out.flatten(2))


def buckets(distance, count):
    half = count // 2
    far = half + ((distance.float() / half).log() / torch.tensor(2.0).log() * (count - half)).clamp(max=count).long()
    return torch.where(distance < half, distance, far.clamp(max=count - 1))


class PlainBlock(nn.Module):
    def __init__(self, kind, dim, hidden, heads, head_dim, length):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attention = PlainAttention(kind, dim, heads, head_dim, length)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Plain(nn.Module):
    def __init__(self, kind, config):
        super().__init__()
        (group,), dim = config.heads, config.dim
        sizes = config.feedforward.hidden, group.heads, group.dim, config.max_length
        self.embed = nn.Linear(config.inputs.size, dim)
        self.blocks = nn.Sequential(*(PlainBlock(kind, dim, *sizes) for _ in range(config.layers)))
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, getattr(config.outputs, "count", 1))

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embed(x))))


@torch.no_grad()
def copy_into(plain, ours):
    """The parameters of `ours`, laid out for the plain network."""
    pairs = [(plain.embed, ours.inputs.linear), (plain.norm, ours.norm), (plain.head, ours.outputs.linear)]
    for theirs, mine in zip(plain.blocks, ours.blocks, strict=True):
        pairs += [(theirs.norm1, mine.norm1), (theirs.norm2, mine.norm2), (theirs.attention.out, mine.attention.out)]
        pairs += [(theirs.up, mine.feedforward.up), (theirs.down, mine.feedforward.down)]
        weights = mine.attention.qkv.weight.split(mine.attention.widths)
        biases = mine.attention.qkv.bias.split(mine.attention.widths)
        for f, w, b in zip((theirs.attention.q, theirs.attention.k, theirs.attention.v), weights, biases, strict=True):
            f.weight.copy_(w)
            f.bias.copy_(b)
        theirs.attention.table.copy_(mine.attention.relative.table)
    for target, source in pairs:
        target.weight.copy_(source.weight)
        target.bias.copy_(source.bias)


def our_step(model, task, batch_size, whole):
    train = Train(batch_size=batch_size)
    optimiser = build(model, train)

    def step(i):
        batch = task.batch("train", batch_size, seed=0, step=i)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(i, train)
        outputs = model(batch.inputs) if whole else predict(model, task, batch)
        loss = task.loss(outputs, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss

    return step


def plain_step(model, task, batch_size):
    train = Train(batch_size=batch_size)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=1e-3)

    def step(i):
        batch = task.batch("train", batch_size, seed=0, step=i)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(i, train)
        loss = task.loss(model(batch.inputs), batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss

    return step


def median_interval(values):
    """The median with the narrowest symmetric 95 % interval by order statistics; all of fewer than six values.

    Of n values, k or fewer lie below the true median with the probability P(B <= k), B binomial (n, 1/2).  So it lies
    outside of the values number k + 1 and n - k with twice that probability, which may be 1/20.
    """
    ordered, n = sorted(values), len(values)
    tails = itertools.accumulate(math.comb(n, k) for k in range(n))
    left_out = max((k for k, tail in enumerate(tails) if 40 * tail <= 2**n), default=0)
    return statistics.median(ordered), ordered[left_out], ordered[n - 1 - left_out]


def steps_of(kind, shape, compiled, whole):
    """The training steps of our network and of the plain one, with the same parameters."""
    torch.manual_seed(0)
    size = SHAPES[shape]
    if shape == "sraven":
        run = RECIPES[f"sraven-{kind}"]()
        task, config = run.task, run.model
    else:
        task, group = FuzzyLogic(), GROUPS[kind](8, dim=size["head"], value_dim=size["head"])
        config = fuzzy_model(task, group, dim=size["dim"], hidden=size["hidden"])
    ours, plain = Transformer(config), Plain(kind, config)
    copy_into(plain, ours)
    if compiled:
        ours.compile()
    return our_step(ours, task, size["batch"], whole), plain_step(plain, task, size["batch"])


def serve(pipe, side, as_trainer, *what):
    """A process with one of the networks: its products, then seconds and loss of every step that is asked for."""
    torch.set_num_threads(1)
    if as_trainer:
        keep_memory()
    step = steps_of(*what)[side]
    with fast_products(as_trainer) as products:
        pipe.send(str(products))
        while (i := pipe.recv()) is not None:
            start = time.process_time()
            loss = step(i)
            pipe.send((time.process_time() - start, loss.item()))


def measure(kind, shape, pairs, compiled, whole, equal):
    pipes, processes = [], []
    for side, as_trainer in enumerate((True, equal)):
        here, there = SPAWN.Pipe()
        arguments = (there, side, as_trainer, kind, shape, compiled, whole)
        processes.append(SPAWN.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        there.close()  # so that a process that failed is noticed
        pipes.append(here)
    names = [pipe.recv() for pipe in pipes]

    def step(side, i):
        pipes[side].send(i)
        return pipes[side].recv()

    first = [step(side, 0)[1] for side in (0, 1)]
    if abs(first[0] - first[1]) > 1e-5 * abs(first[1]):
        raise SystemExit(f"{kind}: parity is red, nothing is timed: losses {first[0]:.7f} and {first[1]:.7f}")
    times = ([], [])
    for i in range(1, WARM + pairs):
        for side in (0, 1) if i % 2 else (1, 0):
            times[side].append(step(side, i)[0])
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    times = [each[WARM - 1 :] for each in times]
    ratio, low, high = median_interval([b / a for a, b in zip(*times, strict=True)])
    mine, theirs = (statistics.median(t) * 1e3 for t in times)
    settings = {"mechanism": kind, "shape": shape, "compile": compiled, "whole": whole, "products": names}
    found = {"ours_ms": mine, "plain_ms": theirs, "ratio": ratio, "low": low, "high": high, "pairs": pairs}
    return settings | found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--shape", choices=SHAPES, default="paper")
    parser.add_argument("--compile", action="store_true", help="compile our network (the plain one stays eager)")
    parser.add_argument("--whole", action="store_true", help="compute the last layer at all positions")
    parser.add_argument("--equal", action="store_true", help="the plain process has our products and memory, too")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread, {options.shape} shape")
    rows = []
    for kind in GROUPS:
        row = measure(kind, options.shape, options.pairs, options.compile, options.whole, options.equal)
        if not rows:
            print("products: ours {}, plain {}".format(*row["products"]))
        rows.append(row)
        print(
            f"{kind:8s} ours {row['ours_ms']:6.1f} ms  plain {row['plain_ms']:6.1f} ms  "
            f"plain/ours {row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]  ({options.pairs} pairs)",
            flush=True,
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
