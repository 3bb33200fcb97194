"""Tokens per second of a softmax language model beside the same network written directly on PyTorch's attention.

    python benchmarks/speed/lm_overhead.py [--pairs 20] [--dim 256] [--layers 4] [--length 256] [--batch 8]
                                           [--vocabulary 256] [--precision fp32|bf16] [--compile] [--json FILE]

Both: RMSNorm before each part, rotary positions, SwiGLU, tied output, fused AdamW; the same parameters, on the same
batches.  Ours takes the trainer's own steps.  The plain one is what one writes on `F.scaled_dot_product_attention`,
with `nn.RMSNorm` and one product for q, k and v.  Logits must be equal before anything is timed.  A pair is one step of
each, in alternating order; figures are those of `polyhead bench`: CPU time of the process on one thread, or CUDA
events.  The ratio, plain / ours, comes with a 95 % interval of the median of pairs (order statistics).
"""

import argparse
import json
import pathlib
import statistics
import tempfile

import torch
from lm_step import Words
from torch import nn
from torch.nn import functional as F
from training import median_interval

from polyhead.config import Logits, Rotary, Run, Softmax, Swiglu, Tokens, Train, TransformerConfig
from polyhead.spec.numbers import swiglu_width
from polyhead.timing.measure import Clock, machine
from polyhead.train import fast_products, optimiser
from polyhead.train.device import pick_device
from polyhead.train.evaluation import autocast
from polyhead.train.loop import Loop, alone

CLIP = 1.0


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.RMSNorm(dim, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        b, t, m = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).unbind(2)
        q, k = (rotated(a, turn) for a in (q, k))
        y = F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in (q, k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, m))
        z = self.norm2(x)
        return x + self.w2(F.silu(self.w1(z)) * self.w3(z))


class Plain(nn.Module):
    """The whole network."""

    def __init__(self, count: int, dim: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, swiglu_width(dim)) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        wide = dim // heads
        angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, wide, 2, dtype=torch.float64) / wide))
        self.register_buffer("turn", torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).float())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        turn = torch.view_as_complex(self.turn[: tokens.shape[1]])[:, None]
        for block in self.blocks:
            x = block(x, turn)
        return F.linear(self.norm(x), self.table.weight) * self.table.embedding_dim**-0.5


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


def copy(ours: nn.Module, plain: Plain) -> None:
    """Our parameters into the plain network."""
    given = {name.replace("attention.", "").replace("feedforward.", ""): p for name, p in ours.named_parameters()}
    given["table.weight"] = given.pop("inputs.table.weight")
    plain.load_state_dict({**given, "turn": plain.turn})


class PlainLoop:
    """The training loop one writes."""

    def __init__(self, plain: Plain, run: Run, device: torch.device) -> None:
        self.model, self.run, self.device, self.step = plain, run, device, 0
        train = run.train
        matrices = [p for n, p in plain.named_parameters() if p.ndim == 2 and "table" not in n]
        others = [p for n, p in plain.named_parameters() if p.ndim == 1 or "table" in n]
        groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=train.betas, eps=train.eps, fused=True)

    def update(self) -> None:
        train = self.run.train
        for group in self.adamw.param_groups:
            group["lr"] = optimiser.learning_rate(self.step, train)
        batch = self.run.task.batch("train", train.batch_size, seed=0, step=self.step, device=self.device)
        self.adamw.zero_grad(set_to_none=True)
        with autocast(self.device, train.precision):
            logits = self.model(batch.inputs)
        F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.adamw.step()
        self.step += 1


def build(options: argparse.Namespace, folder: str) -> tuple[Loop, PlainLoop]:
    """Both loops, on equal parameters; ValueError unless their logits agree."""
    o, device = options, options.device
    task = Words(o.vocabulary, o.length)
    ends = Tokens(o.vocabulary), Logits(o.vocabulary, tied=True, scaled=True)
    shape = {"dim": o.dim, "layers": o.layers, "heads": Softmax(o.heads), "max_length": o.length}
    model = TransformerConfig(
        *ends, feedforward=Swiglu(), positions=Rotary(), causal=True, norm="rms", init="cs336", **shape
    )
    train = Train(batch_size=o.batch, clip=CLIP, precision=o.precision, betas=(0.9, 0.95))
    run = Run(task=task, model=model, train=train, device=str(device), compile=o.compile)
    ours = alone(run, pathlib.Path(folder), device, False)
    network = ours.networks
    plain = Plain(o.vocabulary, o.dim, o.layers, o.heads, o.length).to(device)
    copy(network.model, plain)
    if o.compile:
        plain.compile()
    tokens = task.batch("train", o.batch, seed=1, step=0, device=device).inputs
    with torch.no_grad():
        torch.testing.assert_close(network.model(tokens), plain(tokens), rtol=1e-3, atol=1e-4)
    assert sum(p.numel() for p in network.model.parameters()) == sum(p.numel() for p in plain.parameters())
    return ours, PlainLoop(plain, run, device)


def main() -> None:
    """Print the figures, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"pairs": 20, "dim": 256, "layers": 4, "heads": 8, "length": 256, "batch": 8, "vocabulary": 256}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="compile both")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    options.device = pick_device(options.device)
    if options.device.type == "cpu":
        torch.set_num_threads(1)
    clock = Clock(options.device)
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = build(options, folder)
        for _ in range(3):
            ours._update(), plain.update()
        seconds: dict[str, list[float]] = {"ours": [], "plain": []}
        for i in range(options.pairs):
            both = [("ours", ours._update), ("plain", plain.update)]
            for name, call in both if i % 2 else both[::-1]:
                seconds[name].append(clock.seconds(call))
        ours.close()
    tokens = options.batch * options.length
    ratios = [plain / our for our, plain in zip(seconds["ours"], seconds["plain"], strict=True)]
    median, low, high = median_interval(ratios)
    for name, found in seconds.items():
        step = statistics.median(found)
        print(f"{name:6}{step * 1e3:9.1f} ms a step{tokens / step:12,.0f} tokens/s")
    print(f"tokens per second, ours / plain: {median:.3f}  [{low:.3f}, {high:.3f}]  ({options.pairs} pairs)")
    if options.json:
        given = {name: str(value) for name, value in vars(options).items()}
        found = {"options": given, "seconds": seconds, "ratio": median, "interval": [low, high]}
        found["environment"] = machine(options.device)
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with fast_products():
        main()
