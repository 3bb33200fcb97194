"""Runs of one architecture trained together in one process: all seeds and hyper-parameters of a figure at once.

`groups` finds runs that can be trained together: they differ only in name, seed, the `split_seed` of their task and the
settings of AdamW (learning rate, warm-up, decay, clipping).  Each member writes its own run folder, as if trained
alone.  It can be evaluated, resumed, or continued in another population.  Its losses are those of the run alone, to
rounding: batches, initial parameters and dropout are the same functions of its seed.

Members at different steps, or with other matrix products (`train/products.py`), form separate populations.
`trainer.run` trains single members, and runs that cannot be stacked (`stacked.unsupported_reason`).
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from polyhead import config as configs
from polyhead.config import Run
from polyhead.scale.population.stacked import Stack, unsupported_reason
from polyhead.scale.sweep.job import Failure
from polyhead.scale.sweep.jobs import MEMORY, prepare
from polyhead.train.checks import check
from polyhead.train.device import process
from polyhead.train.loop import Loop
from polyhead.train.member import Member
from polyhead.train.stop import Interrupted, Stop
from polyhead.train.store.checkpoint import read_checkpoint
from polyhead.train.store.claims import claim
from polyhead.train.store.disk import DiskRetry, tell
from polyhead.train.store.files import Damaged, set_aside
from polyhead.train.store.folder import RESULT, Result, finished
from polyhead.train.store.saving import drop, last_whole
from polyhead.train.trainer import run

LARGEST_STACK = 256
"""The most members of one population: each has two open files."""

Outcomes = dict[pathlib.Path, Result | Failure]

CACHED = 1 << 20
"""Activations between two layers that a CPU's cache holds.  They limit the networks of one pass, if at least `FEW`.

Steps of 24 networks on one core, milliseconds a network, at 2^15 activations each: 4.0 one by one, 1.6 by 8, 1.2 by 24;
at 2^17: 7.4, 4.7, 4.6; at 2^19: 12.3, 10.0, 12.8 for width 32 and no gain for width 64.
"""

FEW = 4
"""Fewer networks in a pass are no faster than one by one."""


def train(
    runs: Sequence[Run],
    folder: str | pathlib.Path,
    *,
    progress: bool = True,
    again: bool = False,
    at_once: int | None = None,
) -> list[Result | Failure]:
    """Train every run in `folder`/NAME-DIGEST, similar runs together; results or failures in the order of `runs`.

    Finished runs are skipped, others resume.  `again`: delete earlier training and start over.  `at_once`:
    networks in one pass (default: all on an accelerator; on a CPU, as many as its cache holds).  A member that diverges
    becomes a Failure; the others continue.  On a CPU the process keeps freed memory, which is faster.  Raises
    ValueError for a run that occurs twice, Interrupted after Ctrl-C or SIGTERM, when all have saved.
    """
    places = prepare("population", runs, folder, again=again)
    if at_once is not None and at_once < 1:
        raise ValueError(f"population: at_once must be at least 1 but is {at_once}")
    outcomes: Outcomes = {}
    members: list[Run] = []
    stop = Stop()
    for config, place in zip(runs, places, strict=True):
        if (result := finished(place, configs.digest(config))) is not None:
            outcomes[place] = result
        else:
            members.append(dataclasses.replace(config, folder=str(place)))
    try:
        with stop:
            for part in [part for group in groups(members) for part in _of_one_step(group, outcomes)]:
                _train(part, outcomes, stop, progress, at_once)
                if stop.asked:
                    raise Interrupted
    except Interrupted as stopped:
        said = "stopped and saved" if stopped.saved else str(stopped)
        done = sum(isinstance(outcome, Result) for outcome in outcomes.values())
        text = f"{said}; {done} of {len(runs)} runs are done, the same command resumes"
        raise stop.interrupted(text) from None
    return [outcomes[place] for place in places]


def groups(runs: Sequence[Run]) -> list[list[Run]]:
    """`runs` in groups that can be trained together, each in the order of its first run."""
    found: dict[object, list[Run]] = {}
    for i, config in enumerate(runs):
        alone = unsupported_reason(config) is not None
        found.setdefault(i if alone else _kind(config), []).append(config)
    return [group[i : i + LARGEST_STACK] for group in found.values() for i in range(0, len(group), LARGEST_STACK)]


def _kind(config: Run) -> str:
    """The settings of a run that its population shares, as text."""
    own = configs.Train()
    train = dataclasses.replace(
        config.train, lr=own.lr, weight_decay=own.weight_decay, warmup=own.warmup, final=own.final,
        early_floor=own.early_floor, clip=own.clip, betas=own.betas, eps=own.eps,
    )  # fmt: skip
    task: Any = config.task
    if hasattr(task, "split_seed"):  # split_seed only changes data, and each member has its own data
        task = dataclasses.replace(task, split_seed=0)
    common = dataclasses.replace(config, name="", seed=0, folder=None, train=train, task=task)
    return json.dumps(configs.to_dict(common), sort_keys=True)


def _of_one_step(group: Sequence[Run], outcomes: Outcomes) -> list[list[Run]]:
    """The members of a group, by step and matrix products.  A run that another process trains is a failure."""
    parts: dict[tuple[int, bool | None], list[Run]] = {}
    for config in group:
        folder = pathlib.Path(str(config.folder))
        try:
            with claim(config, folder):
                found = _reached(config, folder)
            at = (found["step"], found.get("fast_products", False)) if found else (0, None)
            parts.setdefault(at, []).append(config)
        except ValueError as error:
            outcomes[folder] = Failure(config.name, folder, 2, str(error))
    return list(parts.values())


def _reached(config: Run, folder: pathlib.Path) -> dict[str, Any] | None:
    """The metadata of the last undamaged checkpoint."""

    def read(path: pathlib.Path) -> dict[str, Any] | None:
        if path.is_dir():
            raise ValueError(f"population: {path} was saved in parts; resume with: polyhead resume {folder}")
        try:
            return read_checkpoint(folder, configs.digest(config), path.name)[1]
        except Damaged as error:
            drop(path, error)
            return None

    return last_whole(config.name, folder, read)


def _train(part: Sequence[Run], outcomes: Outcomes, stop: Stop, progress: bool, at_once: int | None) -> None:
    """Train runs that can be trained together; a single run is trained as usual."""
    if len(part) > 1:
        _together(part, outcomes, stop, progress, at_once)
        return
    folder = pathlib.Path(str(part[0].folder))
    try:
        outcomes[folder] = run(part[0], progress=progress, resume=True)
    except (ValueError, OSError) as error:
        outcomes[folder] = _failure(part[0], folder, error)


def _failure(config: Run, folder: pathlib.Path, error: ValueError | OSError) -> Failure:
    """The failure, in the form of a sweep's worker."""
    if isinstance(error, OSError):
        return Failure(config.name, folder, 1, error.strerror or str(error))
    return Failure(config.name, folder, 2, str(error))


def _together(part: Sequence[Run], outcomes: Outcomes, stop: Stop, progress: bool, at_once: int | None) -> None:
    retry = DiskRetry(stop)
    with contextlib.ExitStack() as held:
        members = []
        for config in part:
            folder = pathlib.Path(str(config.folder))
            try:
                check(config)
                held.enter_context(claim(config, folder))
                config.task.keep(folder)
                if (folder / RESULT).exists():  # a readable result would not be trained again
                    set_aside(folder / RESULT, f"{folder / RESULT} is damaged")
                members.append(Member(config, folder, retry))
            except (ValueError, OSError) as error:
                outcomes[folder] = _failure(config, folder, error)
        if members:
            with process(part[0]) as device:
                _fit(members, device, outcomes, stop, progress, at_once or networks_at_once(part[0], device))


def _fit(
    members: list[Member], device: torch.device, outcomes: Outcomes, stop: Stop, progress: bool, at_once: int
) -> None:
    if device.type == "cpu":
        _keep_memory()

    def ended(member: Member, outcome: Result | ValueError | OSError) -> None:
        if isinstance(outcome, Result):
            outcomes[member.folder], said = outcome, f"done ({member.folder})"
        else:
            outcomes[member.folder], said = _failure(member.config, member.folder, outcome), f"failed: {outcome}"
        if progress:
            tell(f"{member.config.name}: {said}")

    networks = Stack([member.config for member in members], device, at_once)
    loop = Loop(members, networks, device, progress=progress, ended=ended)
    try:
        loop.progress.line(f"{loop.progress.name}: from step {loop.step}, {min(at_once, len(members))} in a pass")
        loop.fit(stop)
    except OSError as error:  # an error that is not temporary
        for member in loop.members:
            outcomes.setdefault(member.folder, _failure(member.config, member.folder, error))
    finally:
        loop.close()


def networks_at_once(config: Run, device: torch.device) -> int:
    """Networks in one pass: all on an accelerator and in compiled code; on a CPU, as many as its cache holds.

    A pass of tiny networks is mostly overhead, which they share; larger networks evict each other from the cache.
    """
    if device.type != "cpu" or config.compile:
        return LARGEST_STACK
    model, length = config.transformer, config.task.length
    heads = max(sum(group.heads for group in model.layer_heads(i)) for i in range(model.layers))
    fit = CACHED // (config.train.batch_size * length * max(4 * model.dim, heads * length))
    return fit if fit >= FEW else 1


def _keep_memory() -> None:
    """Let the C library keep freed memory, as in workers of a sweep; else every step asks the system for it again.

    Saves 12 to 18 % of a step for the paper's and the demo's network on one core.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in MEMORY):
        with contextlib.suppress(AttributeError, OSError):  # without glibc
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-1, int(MEMORY["MALLOC_TRIM_THRESHOLD_"]))
            mallopt(-3, int(MEMORY["MALLOC_MMAP_THRESHOLD_"]))
