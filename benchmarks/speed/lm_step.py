"""A training step of a language model with HYLA heads beside the same with softmax heads: tokens a second, memory.

    python benchmarks/speed/lm_step.py --json lm.json        52 million parameters in bf16: wants a GPU
    python benchmarks/speed/lm_step.py --small               a small model, for a CPU

6 layers, width 512, 8 heads, rotary positions, 32,000 tokens, contexts 512 and 4096, as many tokens a step in both.
The steps are the trainer's own (AdamW, clipping, mixed precision) on random tokens; both models take turns.  Time is
that of `polyhead bench`: CUDA events, or CPU time; memory is the growth of the peak over a step.  Nothing is timed
unless the parity of HYLA and of softmax attention is green.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from polyhead.config import Batch, Hyla, Logits, Mechanism, Rotary, Run, Softmax, Task, Tokens, Train, TransformerConfig
from polyhead.models.size import parameters
from polyhead.timing.measure import SMALL, Clock, machine, parity, peak
from polyhead.timing.options import Options
from polyhead.timing.sides import sides, tensors
from polyhead.train import fast_products
from polyhead.train.device import pick_device
from polyhead.train.loop import alone

HEADS: dict[str, type[Mechanism]] = {"hyla": Hyla, "softmax": Softmax}
LARGE = {"layers": 6, "dim": 512, "heads": 8, "vocabulary": 32_000, "contexts": (512, 4096), "tokens": 16_384}
SMALLER = {"layers": 2, "dim": 64, "heads": 4, "vocabulary": 256, "contexts": (128, 512), "tokens": 1024}


@dataclass(frozen=True)
class Words(Task):
    """Random tokens, each to be told from those before it: what they say does not change what a step costs."""

    vocabulary: int = 256
    context: int = 128

    name: ClassVar[str] = "words"
    metric: ClassVar[str] = "accuracy"

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train",)

    @property
    def ends(self) -> tuple[Tokens, Logits]:
        return Tokens(self.vocabulary), Logits(self.vocabulary)

    @property
    def length(self) -> int:
        return self.context

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        size, where = (batch_size, self.context + 1), generator.device
        drawn = torch.randint(self.vocabulary, size, generator=generator, device=where)
        scored = torch.ones(batch_size, self.context, dtype=torch.bool, device=where)
        return Batch(drawn[:, :-1], drawn[:, 1:], None, scored, {})

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten())

    def metrics(self, outputs: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
        return {"accuracy": (outputs.argmax(-1) == batch.targets).float().mean(-1)}


def run_of(kind: str, context: int, size: dict[str, Any], options: argparse.Namespace) -> Run:
    """One of the two runs that are compared; they differ in their heads alone."""
    task = Words(size["vocabulary"], context)
    shape = {"dim": size["dim"], "layers": size["layers"], "max_length": context}
    model = TransformerConfig(
        *task.ends, heads=HEADS[kind](size["heads"]), positions=Rotary(), causal=True, norm="rms", **shape
    )
    precision = options.precision or ("fp32" if options.device.type == "cpu" else "bf16")
    train = Train(batch_size=max(1, size["tokens"] // context), clip=1.0, precision=precision)
    return Run(task=task, model=model, train=train, device=str(options.device), compile=options.compile)


def check(size: dict[str, Any], options: argparse.Namespace) -> None:
    """Refuse to time what is wrong."""
    for op in HEADS:
        width = size["dim"] // size["heads"]
        case = Options(op, heads=size["heads"], dim=width, device=str(options.device)).settled()
        small = tensors(case, SMALL, 1)
        parity(case, sides(case, small)[0], small)


def measure(context: int, size: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model."""
    with tempfile.TemporaryDirectory() as folder:
        loops, rows = {}, {}
        for kind in HEADS:
            run = run_of(kind, context, size, options)
            where = pathlib.Path(folder) / kind
            where.mkdir()
            loops[kind] = alone(run, where, options.device, False)
            loops[kind]._update()  # makes the state of AdamW, and compiles
            memory = peak(options.device, loops[kind]._update)
            rows[kind] = {"context": context, "heads": kind, "memory": memory, "batch": run.train.batch_size}
            rows[kind] |= {"parameters": parameters(run.model), "precision": run.train.precision}
        clock, seconds = Clock(options.device), {kind: [] for kind in HEADS}
        for _ in range(options.repeats):
            for kind, loop in loops.items():
                seconds[kind].append(clock.seconds(loop._update))
        for kind, loop in loops.items():
            tokens = rows[kind]["batch"] * context
            rows[kind]["seconds"] = {"min": min(seconds[kind]), "median": statistics.median(seconds[kind])}
            rows[kind]["tokens_per_second"] = tokens / statistics.median(seconds[kind])
            loop.close()
    return list(rows.values())


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="2 layers of width 64, contexts 128 and 512")
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, help="in a step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on a GPU")
    parser.add_argument("--compile", action="store_true", help="compile both models")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    options.device = pick_device(options.device)
    if options.device.type == "cpu":
        torch.set_num_threads(1)
        if not options.small:
            print("lm_step: this size wants a GPU; on a CPU a step takes minutes (--small does not)", flush=True)
    size = dict(SMALLER if options.small else LARGE)
    size["tokens"] = options.tokens or size["tokens"]
    check(size, options)
    rows = []
    for context in options.contexts or size["contexts"]:
        rows += measure(context, size, options)
        if context == (options.contexts or size["contexts"])[0]:
            print(f"{rows[0]['parameters']:,} parameters, {rows[0]['precision']}, {options.device}")
            print(f"{'context':>8}{'batch':>7} {'heads':9}{'tokens/s':>12}{'ms/step':>11}{'MiB':>10}{'of softmax':>12}")
        softmax = next(row for row in rows if (row["context"], row["heads"]) == (context, "softmax"))
        for row in rows[-len(HEADS) :]:
            part = row["tokens_per_second"] / softmax["tokens_per_second"]
            print(
                f"{context:8d}{row['batch']:7d} {row['heads']:9}{row['tokens_per_second']:12,.0f}"
                f"{row['seconds']['median'] * 1e3:11.1f}{row['memory'] / 2**20:10.0f}{part:12.2f}",
                flush=True,
            )
    if options.json:
        given = {name: str(value) for name, value in vars(options).items()}
        result = {"options": given, "size": size, "rows": rows, "environment": machine(options.device)}
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with fast_products():
        main()
