"""How fast are the mechanisms here?  HYLA, softmax, relational and linear attention, a training step, decoding.

    python benchmarks/speed.py [--lengths 512 1024] [--repeats 7] [--json FILE]

Every implementation of an op is timed in turns beside PyTorch's own softmax attention of the same size, so that a
change of the machine's speed meets all alike. A time is the median of the process's CPU seconds on one thread; a
ratio is that over the time of PyTorch's attention. An implementation whose numbers differ from the reference is not
timed. The training step is that of a small fuzzy-logic model; decoding makes tokens with a cache, one at a time.
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F

import polyhead as ph
from polyhead.ops.registry import IMPLS, resolve

HEADS, WIDTH, RELATIONS = 8, 8, 8
SKIPPED = ("triton",)
"""Needs a GPU (gpu.py)."""


def tensors_of(op, b, t):
    """The tensors of an op, with gradients."""
    torch.manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, requires_grad=True)

    q, k, v = (randn(b, t, HEADS, WIDTH) for _ in range(3))
    if op == "relational":
        return [q, k, randn(b, t, RELATIONS, 1), randn(b, t, RELATIONS, 1), v, randn(HEADS, WIDTH, RELATIONS)]
    return [q, k, v]


def torch_attention(q, k, v):
    """PyTorch's own causal softmax attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def forward(function, tensors):
    with torch.no_grad():
        return function(*tensors)


def with_gradients(function, tensors):
    out = function(*tensors)
    return torch.autograd.grad(out, tensors, torch.ones_like(out))


def median_times(functions, repeats):
    """Median CPU seconds of each function; they take turns, after a first call that is not counted."""
    for function in functions.values():
        function()
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def agrees(op, impl, tensors):
    """Whether an implementation takes the call and has the numbers of the reference."""
    try:
        out = resolve(op, impl)(*tensors, causal=True)
    except ValueError:
        return False
    expected = resolve(op, "reference")(*tensors, causal=True)
    return bool((out - expected).norm() <= 1e-4 * expected.norm())


def op_rows(lengths, batch_pairs, repeats):
    """A row for each op, implementation, length and pass."""
    for op in ("softmax", "hyla", "relational", "linear"):
        for t in lengths:
            b = max(1, batch_pairs // (t * t))
            tensors = tensors_of(op, b, t)
            impls = [impl for impl in IMPLS[op] if impl not in SKIPPED and agrees(op, impl, tensors)]
            for name, run in (("forward", forward), ("with gradients", with_gradients)):
                qkv = tensors_of("softmax", b, t)
                functions = {"torch": functools.partial(run, torch_attention, qkv)}
                for impl in ("auto", *impls):
                    function = functools.partial(resolve(op, impl), causal=True)
                    functions[impl] = functools.partial(run, function, tensors)
                times = median_times(functions, repeats)
                for impl, seconds in times.items():
                    if impl != "torch":
                        yield {"what": op, "impl": impl, "b": b, "t": t, "pass": name, "ms": 1e3 * seconds,
                               "over torch": seconds / times["torch"]}  # fmt: skip


def fuzzy_model(heads):
    """The model of the fuzzy-logic task with some heads."""
    task = ph.tasks.FuzzyLogic()
    return task, ph.Transformer(ph.TransformerConfig(*task.ends, dim=64, layers=2, heads=heads))


def training_rows(repeats):
    """A training step of the fuzzy-logic model with each kind of heads, beside softmax heads."""
    functions = {}
    for heads in (ph.Softmax(HEADS), ph.Hyla(HEADS), ph.Linear(HEADS)):
        task, model = fuzzy_model(heads)
        optimiser = torch.optim.AdamW(model.parameters())
        batch = task.batch("train", 128, seed=0, step=0)

        def step(task=task, model=model, optimiser=optimiser, batch=batch):
            loss = task.loss(model(batch.inputs), batch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

        functions[type(heads).__name__] = step
    times = median_times(functions, repeats)
    for name, seconds in times.items():
        yield {"what": "training step", "impl": name, "ms": 1e3 * seconds, "over softmax": seconds / times["Softmax"]}


def decoding_rows(repeats, num_tokens=32):
    """Decoding with a cache, for each kind of heads."""
    mixtures = {
        "Softmax": (ph.Softmax(HEADS),),
        "Hyla": (ph.Hyla(HEADS),),
        "Linear": (ph.Linear(HEADS),),
        "Relational": (ph.Softmax(HEADS // 2), ph.Relational(HEADS // 2)),
    }
    prompt = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(0))
    functions = {}
    for name, heads in mixtures.items():
        settings = ph.TransformerConfig(
            ph.Tokens(512), ph.Logits(512), dim=256, layers=4, heads=heads, positions=ph.Rotary(), max_length=128,
            causal=True,
        )  # fmt: skip
        model = ph.Transformer(settings).eval()
        functions[name] = lambda model=model: ph.generate(model, prompt, steps=num_tokens, temperature=0.0)
    times = median_times(functions, max(1, repeats // 2))
    for name, seconds in times.items():
        yield {
            "what": "decoding",
            "impl": name,
            "ms": 1e3 * seconds / num_tokens,
            "over softmax": seconds / times["Softmax"],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 512], help="queries and keys of a call")
    parser.add_argument("--pairs", type=int, default=1 << 18, help="pairs b t s of a call, which give its batch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for generator in (
        op_rows(options.lengths, options.pairs, options.repeats),
        training_rows(options.repeats),
        decoding_rows(options.repeats),
    ):
        for row in generator:
            rows.append(row)
            cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
            print("  ".join(f"{cell:>14}" for cell in cells), flush=True)
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
