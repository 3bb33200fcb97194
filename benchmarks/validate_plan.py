"""What `polyhead plan` estimates beside what is measured here.

    python benchmarks/validate_plan.py [--json docs/results/planning.json]

Parameters, gradients and AdamW's moments against those of a real run, byte by byte.  Memory: growth of the peak of
torch's allocator over a forward and a backward pass (as `polyhead bench`), and what autograd holds between them
(`saved_tensors_hooks`, each storage once).  Operations: FlopCounterMode over a real step on the reference impl, and
the formula 6 (N + A) of `train/throughput.py`.  Time: CPU time of one thread; calibrated on one batch size, estimated
at others; the same of another recipe's calibration.  Communication: bytes that two gloo processes hand to collectives.
"""

import argparse
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks; it looks when torch is imported

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polyhead.config import (
    CoRelNetConfig,
    PrediNetConfig,
    Run,
    TransformerConfig,
)
from polyhead.models.build import build
from polyhead.papers.recipes import RECIPES
from polyhead.scale.plan.cards import card
from polyhead.scale.plan.estimate import _PlannedRun, measured, step
from polyhead.timing.measure import machine, peak
from polyhead.train import fast_products, optimiser
from polyhead.train.throughput import operations

MEMORY = (
    *("fuzzy-softmax", "fuzzy-linear", "fuzzy-hyla", "sraven-softmax", "sraven-linear", "sraven-hyla", "games-dual"),
    *("sorting-dual", "maths-dual", "digits-dual", "lm-softmax", "lm-linear", "lm-hyla", "lm-dual", "lm-disentangled"),
    *("lm-abstractor-heads", "lm-mixture"),
)

OPERATIONS = ("fuzzy-softmax", "sraven-softmax", "lm-softmax", "fig-6")
TIMES = ("fuzzy-softmax", "fuzzy-hyla", "sraven-softmax", "lm-softmax", "lm-hyla", "lm-dual")

CPU = torch.device("cpu")


def recipe(name: str) -> Run:
    """A recipe's run, the first of several."""
    found = RECIPES[name]()
    return found[0] if isinstance(found, tuple) else found


def cases() -> Iterator[tuple[str, Run]]:
    """What the recipes do not have: half precision, checkpointing, pieces, other models."""
    run = recipe("lm-softmax")
    yield "lm-softmax, bf16", replace(run, train=replace(run.train, precision="bf16"))
    yield "lm-softmax, checkpoint", replace(run, model=replace(run.transformer, checkpoint=True))
    yield "lm-softmax, 4 pieces", replace(run, train=replace(run.train, accumulate=4))
    games = recipe("games-dual")
    yield "CoRelNet on games", replace(games, model=CoRelNetConfig(*games.task.ends))
    yield "PrediNet on games", replace(games, model=PrediNetConfig(*games.task.ends))


# --------------------------------------------------------------------------------------------------------------- memory
def memory(name: str, run: Run) -> dict[str, Any]:
    """Estimated and measured bytes."""
    place = _PlannedRun(run, 1, card("this"))
    have = place.counted(place.sequences)
    told = place.memory(have)
    torch.manual_seed(0)
    model = build(run.model).train()
    batch = run.task.batch("train", place.sequences, seed=run.seed, step=0)
    adamw = optimiser.build(model, run.train)
    held = kept(model, run, batch)
    real: dict[str, float] = {"parameters": size(model.parameters())}
    adamw.step()
    real["gradients"] = size(p.grad for p in model.parameters() if p.grad is not None)
    real["moments"] = size(x for state in adamw.state.values() for x in state.values() if torch.is_tensor(x))

    def again() -> None:
        if run.train.accumulate == 1:
            model.zero_grad(set_to_none=True)
        step(model, run, batch, clear=False)

    if run.train.accumulate == 1:
        model.zero_grad(set_to_none=True)
    grown = peak(CPU, again)
    estimated = have.most - have.parameters - have.buffers - have.inputs
    estimated -= told["gradients"] if run.train.accumulate > 1 else 0
    found = {"what": name, "sequences": place.sequences, "grown": grown, "estimated": estimated}
    found |= {"ratio": estimated / grown, "kept": held, "kept_estimated": have.kept}
    return found | {"exact": {key: [told[key], value] for key, value in real.items()}}


def size(tensors: Any) -> float:
    return float(sum({x.data_ptr(): x.numel() * x.element_size() for x in tensors}.values()))


def kept(model: nn.Module, run: Run, batch: Any) -> float:
    """Bytes of all storages that autograd saves, without the parameters and the batch."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    batch.map(lambda x: own.add(x.untyped_storage().data_ptr()) or x)
    seen: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step(model, run, batch)
    return float(sum(seen.values()))


# ----------------------------------------------------------------------------------------------------------- operations
def counted(name: str) -> dict[str, Any]:
    """Ours beside FlopCounterMode's on the same model with plain products, and beside the formula's.

    FlopCounterMode counts all pairs of causal attention, of which we count half: so both without causality.
    """
    run = recipe(name)
    full = replace(run, model=replace(run.transformer, causal=False))
    batch = run.task.batch("train", run.train.batch_size, seed=run.seed, step=0)
    model = build(replace(full.transformer, heads=plain(full.transformer))).train()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        step(model, full, batch)
    theirs, ours = counter.get_total_flops(), count_of(full).operations
    found = {"what": name, "ours": ours, "flop_counter": theirs, "over_flop_counter": ours / theirs}
    if run.task.tail is None:  # the formula computes every position of every layer
        own = count_of(run)
        found["formula"] = operations(build(run.transformer), run.task.length) * own.tokens
        found["over_formula"] = own.operations / found["formula"]
    return found


def count_of(run: Run) -> Any:
    place = _PlannedRun(run, 1, card("this"))
    return place.counted(place.sequences)


def plain(model: TransformerConfig) -> Any:
    return tuple(replace(group, impl="reference") for group in model.layer_heads(0))


# ----------------------------------------------------------------------------------------------------------------- time
def times(name: str) -> dict[str, Any]:
    """Measured at several sizes; estimated from the measurement at the recipe's own."""
    run = recipe(name)
    place, own = _PlannedRun(run, 1, card("this")), run.train.batch_size
    sizes = [n for n in (own // 4, own // 2, own, 2 * own) if n]
    rows = {n: measured(run, n, 7) for n in sizes}
    ideal = {n: ideal_of(place, n) for n in sizes}
    share = ideal[own] / rows[own]
    table = [{"sequences": n, "seconds": rows[n], "estimated": ideal[n] / share} for n in sizes]
    worst = max(abs(row["estimated"] / row["seconds"] - 1) for row in table)
    return {"what": name, "share": share, "rows": table, "worst": worst}


def ideal_of(place: _PlannedRun, sequences: int) -> float:
    have = place.counted(sequences)
    return place.working(have.forward, 1.0) + place.working(have.backward, 1.0)


# -------------------------------------------------------------------------------------------------------- communication
def handed(parallel: str, path: str, rank: int) -> None:
    """In one of two processes: the bytes that a step hands to each collective."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Ears(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.bytes: dict[str, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional"):
                tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
                most = max((x.numel() * x.element_size() for x in tensors), default=0)
                self.bytes[func.__name__] = self.bytes.get(func.__name__, 0) + most
            return func(*args, **(kwargs or {}))

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    from polyhead.train.loop import alone
    from polyhead.train.world import World

    run = replace(recipe("lm-softmax"), parallel=parallel, device="cpu")
    world = World.here("cpu")
    with world.joined(), tempfile.TemporaryDirectory() as folder:
        loop = alone(run, pathlib.Path(folder), CPU, False, None, world)
        loop._update()
        with Ears() as ears:
            loop._update()
    if rank == 0:
        pathlib.Path(path).write_text(json.dumps(ears.bytes), encoding="utf-8")


def exchanged(parallel: str) -> dict[str, Any]:
    """What two gloo processes hand over in a step, beside what is estimated."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "bytes.json")
        context = torch.multiprocessing.get_context("spawn")
        both = [context.Process(target=handed, args=(parallel, path, rank)) for rank in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join()
        real = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    place = _PlannedRun(replace(recipe("lm-softmax"), parallel=parallel), 2, card("this"))
    whole = size_of(place.model.parameters())
    told = {"allreduce": whole}
    if place.sharded:
        told = {"allgather": round(2 * whole - place.units[0]), "reduce_scatter": whole}
    return {"parallel": parallel, "handed": real, "estimated": told}


def size_of(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


# ----------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    """Print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("memory", "operations", "time", "exchange"))
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = options.only or ("memory", "operations", "time", "exchange")
    found: dict[str, Any] = {"environment": machine(CPU)}
    if "memory" in asked:
        found["memory"] = []
        for name, run in (*((name, recipe(name)) for name in MEMORY), *cases()):
            row = memory(name, run)
            found["memory"].append(row)
            exact = all(a == b for a, b in row["exact"].values())
            print(f"{name:24} estimated / measured growth {row['ratio']:.3f}, exact {exact}", flush=True)
    if "operations" in asked:
        found["operations"] = [counted(name) for name in OPERATIONS]
        for row in found["operations"]:
            print(f"{row['what']:24} ours / FlopCounterMode {row['over_flop_counter']:.3f}", row.get("over_formula"))
    if "time" in asked:
        found["time"] = []
        for name in TIMES:
            row = times(name)
            found["time"].append(row)
            line = ", ".join(f"{r['sequences']}: {r['estimated'] / r['seconds'] - 1:+.0%}" for r in row["rows"])
            print(f"{name:24} share {row['share']:.2f}; {line}", flush=True)
    if "exchange" in asked:
        found["exchange"] = [exchanged(parallel) for parallel in ("data", "sharded")]
        for row in found["exchange"]:
            print(row)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with fast_products():
        main()
