"""The work of each process in the tests of runs on several devices (`worker_main`)."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import sys
from typing import Any

import pytest
import torch
from tiny_runs import before_batch, tiny

import polyhead as ph
from polyhead.models.build import build
from polyhead.tasks import Text
from polyhead.train import evaluate, network, run
from polyhead.train.__main__ import main as worker
from polyhead.train.parallel import reshard, shard
from polyhead.train.world import World

OFTEN = {"eval_batches": 2, "keep": 9, "log_every": 2, "eval_every": 13, "save_every": 10}


def fuzzy(folder: object, **changes: Any) -> Any:
    """Sixteen steps of batches of 12 in parts, with clipping, no dropout; saved after 10."""
    sizes: dict[str, Any] = {"steps": 16, "batch_size": 12, "accumulate": 2, "warmup": 5, "lr": 3e-3, "clip": 0.05}
    plain: dict[str, Any] = {"name": "fuzzy", "dropout": 0.0, "residual_dropout": 0.0}
    return tiny(folder, **plain, **sizes, **OFTEN, **changes)


def text(folder: object, **changes: Any) -> Any:
    """The same of a language model whose table also gives its logits, with symbols read from all layers."""
    root = pathlib.Path(str(folder)).parent
    (root / "documents").mkdir(parents=True, exist_ok=True)
    for i in range(20):
        (root / "documents" / f"{i:02}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    task = Text(str(root / "documents"), length=16, tokenizer="bytes", held_out=0.2, folder=str(root / "tokens"))
    ends = (ph.Tokens(256), ph.Logits(256, tied=True, scaled=True))
    heads = (ph.Softmax(1), ph.Relational(1, symbols=ph.SymbolicAttention(count=4, heads=1)))
    model = ph.TransformerConfig(*ends, dim=16, layers=2, heads=heads, causal=True, norm="rms", max_length=16)
    train = ph.Train(steps=16, batch_size=12, warmup=5, lr=3e-3, evaluate=("validation",), **OFTEN)
    here: dict[str, Any] = {"folder": str(folder), "device": "cpu", "threads": 1}
    run = ph.Run(task=task, model=model, name="text", train=train, seed=7, **here)
    return dataclasses.replace(run, **changes)


RUNS = {"fuzzy": fuzzy, "text": text}


def worker_main(root: str, *cases: str) -> None:
    """A case is KIND-HOW (a run in ROOT/KIND-HOW), `evaluate` or `draw`.

    `stop:NAME`, the last of all: the last process sends itself SIGTERM at its 14th batch.
    """
    if cases[-1].startswith("stop:"):
        train(pathlib.Path(root), *cases[:-1])
        name = cases[-1].removeprefix("stop:")
        folder = pathlib.Path(root) / name
        folder.mkdir(exist_ok=True)
        config_path = folder / f"{os.getpid()}.json"  # as every process writes the same, each has it when it reads it
        ph.config.save(fuzzy(folder, parallel=name.split("-")[1]), config_path)
        os.replace(config_path, folder / "config.json")
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            stop = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
            before_batch(pytest.MonkeyPatch(), ph.tasks.FuzzyLogic, 13, stop)
        sys.exit(worker([str(folder / "config.json"), "--quiet"]))
    train(pathlib.Path(root), *cases)


def train(root: pathlib.Path, *cases: str) -> None:
    world = World.here("cpu")
    with world.joined():
        for case in cases:
            if case == "evaluate":
                scores = [evaluations(parallel, world) for parallel in ("data", "sharded")]
                if world.rank == world.size - 1:  # all have the same
                    (root / f"evaluated-{world.size}.json").write_text(json.dumps(scores))
                continue
            if case == "draw":
                (root / f"not-drawn-{world.rank}.json").write_text(json.dumps(not_drawn(world)))
                continue
            kind, parallel = case.split("-")
            network.LAZY = 1 if kind == "text" else 2**26
            run(RUNS[kind](root / case, parallel=parallel), progress=False)


def evaluations(parallel: str, world: World) -> dict[str, dict[str, float]]:
    """Scores of a fresh model, by batch size and parts."""
    config = fuzzy("unused")
    torch.manual_seed(1)
    model = build(config.model)
    if parallel == "sharded":
        shard(model, world)
    scores = {
        name: evaluate(model, config.task, "iid", batches=2, batch_size=size, accumulate=parts, world=world)
        for name, (size, parts) in {"uneven": (5, 2), "few": (2, 1), "one": (1, 1)}.items()
    }
    reshard(model)
    return scores


def not_drawn(world: World) -> list[str]:
    """The parameters of a sharded model that `reset_parameters` leaves as they are."""
    model = build(fuzzy("unused").model)
    shard(model, world)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    model.reset_parameters()
    return [name for name, parameter in model.named_parameters() if (parameter.to_local() == 7).any()]


if __name__ == "__main__":
    worker_main(*sys.argv[1:])
