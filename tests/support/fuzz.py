"""Randomly changed inputs: configurations, checkpoints, and other files that polyhead reads.

Every input must be accepted, or refused by a ValueError of one line.  `fuzz` returns the violations.  All randomness
depends on a seed, so input `number` of a target is the same everywhere.
"""

import functools
import io
import json
import pathlib
import random
import resource
import signal
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from dual_arguments import PLAIN, plain_state

import polyhead as ph
from polyhead import config as configs
from polyhead.models.build import build
from polyhead.papers.recipes import RECIPES
from polyhead.tasks import KINDS
from polyhead.tasks.relational_games import original
from polyhead.tasks.text import tokens as text_tokens
from polyhead.tasks.text.tokens import Bytes
from polyhead.train import read_config
from polyhead.train.store.checkpoint import read_checkpoint
from polyhead.train.store.folder import read_metrics, read_result

SECONDS = 5.0  # of CPU time, after which an input counts as hung
MEMORY = 256 << 20  # bytes by which an input may raise the most that the process ever used
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**12, 10**400, -(10**400), 0.0, -1.5, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), "", "nan", "1e400", "x" * 5000, "\ud800", "../../x", "a/b", "\0"),
    *("auto", [], {}, [[]], [1, 2], ["a"], [None], {"kind": "Run"}, {"kind": 3}, {"kind": "Softmax"}, {"": 0}),
)


FEW = ("games", "fuzzy-original", "sraven-hyla", "lm-softmax", "lm-linear", "images", "split", "maths", "sorting")
"""Recipes that are quickly made and together have most classes of parts."""


def seeds(recipes: Iterable[str] | None = None) -> list[Any]:
    """The configurations that are changed: of every recipe (or these) its first run."""
    found = {}
    for name in recipes or RECIPES:
        runs = RECIPES[name]()
        run = runs[0] if isinstance(runs, tuple) else runs
        data = configs.to_dict(run)
        found[json.dumps([data["model"], data["task"]["kind"]])] = data
    return list(found.values())


# ------------------------------------------------------------------------------------------------------------- changes
def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container in `data` with every key or index of it."""
    found, waiting = [], [data]
    while waiting:
        here = waiting.pop()
        if isinstance(here, (dict, list)):
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            found += [(here, key) for key in keys]
            waiting += [here[key] for key in keys]
    return found


def changed(data: Any, dice: random.Random) -> Any:
    """JSON values with one to three things changed in them."""
    data = json.loads(json.dumps(data))
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        if not (spots := places(data)):
            return dice.choice(NASTY)
        holder, key = dice.choice(spots)
        other_holder, other = dice.choice(spots)
        how = dice.randrange(8)
        if how == 0:
            del holder[key]
        elif how == 1:
            holder[key] = json.loads(json.dumps(other_holder[other]))
        elif how == 2 and isinstance(holder, dict):
            holder[dice.choice((f"{key}s", str(key)[:-1], "kind", "folder", "encoder"))] = holder.pop(key)
        elif how == 3:
            holder[key] = [holder[key]] * dice.choice((1, 2, 7))
        elif how == 4 and isinstance(holder[key], (int, float)):
            holder[key] = holder[key] * dice.choice((-1, 2, 0.5, 10**9, 1e30)) + dice.choice((0, 1, -1))
        elif how == 5:
            for _ in range(dice.choice((3, 40, 2000))):
                holder[key] = {"encoder": holder[key]} if dice.random() < 0.5 else [holder[key]]
            return data
        else:
            holder[key] = json.loads(json.dumps(dice.choice(NASTY)))
    return data


def garbled(data: bytes, dice: random.Random) -> bytes:
    """Bytes with some flipped, cut out, doubled or put in; mostly near the beginning, where headers are."""
    row = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        if not row:
            break
        place = dice.randrange(min(len(row), dice.choice((16, 200, 2000, len(row)))))
        how = dice.randrange(6)
        if how == 0:
            row[place] ^= 1 << dice.randrange(8)
        elif how == 1:
            row[place] = dice.randrange(256)
        elif how == 2:
            del row[place : place + dice.choice((1, 3, 50, len(row)))]
        elif how == 3:
            row[place:place] = row[place : place + dice.choice((1, 9, 300))]
        elif how == 4:
            row[place:place] = dice.choice(
                (b"\0", b"\xff" * 8, b'"', b"{", b"[" * 3000, b"9" * 30, b"&a *a", b"!!", b"-")
            )
        else:
            row[place : place + 8] = dice.choice((2**60, 2**31, 10**4, 0)).to_bytes(8, "little")
    return bytes(row)


# ------------------------------------------------------------------------------------------------------------- targets
Target = tuple[Callable[[random.Random], Any], Callable[[Any], object]]
"""What draws an input, and what must accept or refuse it."""


def targets(folder: pathlib.Path, run: ph.Run, recipes: Iterable[str] | None = None) -> dict[str, Target]:
    """All targets by name.  `run`: a run that was trained in its folder; `folder`: an empty one for the inputs."""
    known, trained = seeds(recipes), pathlib.Path(str(run.folder))
    texts = [json.dumps(data, indent=2).encode() for data in known]
    own = configs.digest(run)

    def file(name: str, read: Callable[[pathlib.Path], object]) -> Callable[[bytes], object]:
        def put(data: bytes) -> object:
            (folder / name).write_bytes(data)
            return read(folder / name)

        return put

    def garble(name: str) -> Callable[[random.Random], bytes]:
        data = (trained / name).read_bytes()
        return lambda dice: garbled(data, dice)

    tokenizer = Bytes().to_json().encode()
    return {
        "config": (lambda dice: changed(dice.choice(known), dice), made),
        "config.json": (lambda dice: garbled(dice.choice(texts), dice), file("config.json", read_config)),
        "run.yaml": (lambda dice: garbled(dice.choice(YAML), dice), file("run.yaml", read_config)),
        "checkpoint": (
            garble("checkpoint.safetensors"),
            file("checkpoint.safetensors", lambda path: read_checkpoint(path, own)),
        ),
        "result.json": (garble("result.json"), file("result.json", lambda path: read_result(path.parent))),
        "metrics.jsonl": (garble("metrics.jsonl"), file("metrics.jsonl", lambda path: read_metrics(path.parent))),
        "tokenizer.json": (lambda dice: garbled(tokenizer, dice), file("tokenizer.json", text_tokens.read)),
        "images.npz": (
            lambda dice: garbled(pictures(), dice),
            file("same_pentos.npz", lambda path: original.load.__wrapped__(str(path.parent), "same", "pentominoes")),
        ),
        "package": (
            lambda dice: garbled(package()[1], dice),
            lambda data: ph.compat.dual_attention.load(package()[0], json.loads(data.decode(errors="replace"))),
        ),
    }


@functools.cache
def package() -> tuple[dict[str, torch.Tensor], bytes]:
    """A state dict of the package `dual-attention`, and the arguments of its model."""
    return plain_state(), json.dumps(PLAIN).encode()


@functools.cache
def pictures() -> bytes:
    file = io.BytesIO()
    np.savez(file, images=np.zeros((4, 36, 36, 3), np.uint8), labels=np.zeros((4, 1), np.int64))
    return file.getvalue()


YAML = (
    b"name: mine\nseed: 3\ntask: {kind: FuzzyLogic, length: 6}\nmodel:\n  inputs: {kind: Vectors, size: 5}\n"
    b"  outputs: {kind: Values, size: 1}\n  dim: 8\n  heads:\n  - {kind: Hyla, heads: 2}\n"
    b"train: {lr: 3e-4, steps: 9}\n",
    b"task: &t {kind: FuzzyLogic}\nmodel: {inputs: {kind: Vectors, size: 5}, outputs: {kind: Values, size: 1}}\n"
    b"train:\n  evaluate: [iid, compositional]\n  clip: null\n",
)


def made(data: Any) -> object:
    """The run that `data` describes and, unless it has too many parts, its model without numbers."""
    run = configs.from_dict(data, KINDS)
    if isinstance(run, ph.Run) and parts(run.model) <= 64:
        with torch.device("meta"):
            return build(run.model)
    return run


def parts(model: Any) -> int:
    """About how many modules a model has: of depth and of experts there are as many as asked for."""
    encoder = getattr(model, "encoder", None)
    experts = getattr(getattr(model, "feedforward", None), "count", 1)
    return int(getattr(model, "layers", 1)) * int(experts) + (parts(encoder) if encoder is not None else 0)


def most() -> int:
    """Bytes that this process has ever used at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Hung(Exception):
    """An input that took too long."""


def fuzz(target: Target, name: str, numbers: range) -> dict[str, Any]:
    """Inputs `numbers` of a target: how many were taken, how many refused, and `bad`, those that were neither."""
    (draw, read), (taken, refused, used, bad) = target, (0, 0, most(), [])

    def hung(number: int, frame: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGPROF, hung)
    try:
        for number in numbers:
            given = draw(random.Random(f"{name} {number}"))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                read(given)
                taken += 1
            except ValueError as error:
                if "\n" in str(error) or len(str(error)) > 20_000 or not str(error):
                    bad.append((number, f"{type(error).__name__} not of one line: {str(error)[:200]!r}"))
                refused += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                bad.append((number, f"{type(error).__name__}: {str(error)[:200]}"))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0.0)
            if (now := most()) - used > MEMORY:
                bad.append((number, f"took {(now - used) >> 20} MiB of memory"))
            used = max(used, now)
    finally:
        signal.signal(signal.SIGPROF, before)
    return {"target": name, "inputs": len(numbers), "taken": taken, "refused": refused, "bad": bad}
