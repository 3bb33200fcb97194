"""Peak memory and time of the loss of a language model, and its gradients, with logits and without.

    python benchmarks/speed/loss_memory.py [--vocabulary 32000] [--length 512] [--batch 8] [--dim 512] [--json FILE]

Each way runs in a process of its own: on a CPU the growth of its largest resident memory, on a GPU that of PyTorch's
allocator.  Time is that of the process's CPU, or of CUDA events.  Both must give the same loss and gradients first.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import torch
from hyla import high_water
from torch.nn import functional as F

from polyhead.models.inputs_outputs import LazyLogits
from polyhead.timing.measure import Clock, machine
from polyhead.train import fast_products
from polyhead.train.device import pick_device

WAYS = ("logits", "lazy")


def problem(options: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Stream (b t m), table (c m) and targets (b t)."""
    draw = torch.Generator(device).manual_seed(0)
    size = (options.batch, options.length)
    x = torch.randn(*size, options.dim, generator=draw, device=device)
    weight = torch.randn(options.vocabulary, options.dim, generator=draw, device=device)
    weight.mul_(options.dim**-0.5)  # in place: nothing larger was there before what is measured
    targets = torch.randint(options.vocabulary, size, generator=draw, device=device)
    return x.requires_grad_(), weight.requires_grad_(), targets


def loss(way: str, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if way == "lazy":
        return LazyLogits(x, weight).cross_entropy(targets).mean()
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten())


def check(device: torch.device) -> None:
    """Both ways agree on a small problem."""
    small = argparse.Namespace(batch=2, length=33, dim=16, vocabulary=5000)
    x, weight, targets = problem(small, device)
    results = []
    for way in WAYS:
        value = loss(way, x, weight, targets)
        results.append((value, *torch.autograd.grad(value, (x, weight))))
    torch.testing.assert_close(*results)


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    """In this process: growth of the peak over what is given, and seconds."""
    device = pick_device(options.device)
    check(device)
    given = problem(options, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        before = high_water() * 1024
    seconds = Clock(device).seconds(lambda: loss(way, *given).backward())
    after = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else high_water() * 1024
    return {"memory": after - before, "seconds": seconds}


def main() -> None:
    """Print a line for each way, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 32_000), ("length", 512), ("batch", 8), ("dim", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way:
        print(json.dumps(measure(options.way, options)))
        return
    rows = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        rows[way] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
        )
        print(f"{way:8}{rows[way]['memory'] / 2**20:10,.0f} MiB{rows[way]['seconds']:10.2f} s", flush=True)
    tokens = options.batch * options.length
    whole = tokens * options.vocabulary * 4 / 2**20
    grads = (tokens + options.vocabulary) * options.dim * 4 / 2**20
    print(f"float32 logits are {whole:,.0f} MiB, the gradients that come out {grads:,.0f} MiB")
    if options.json:
        found = {"options": vars(options), "rows": rows, "environment": machine(pick_device(options.device))}
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with fast_products():
        main()
