"""Runs of one architecture trained together in one process: all seeds and hyper-parameters of a figure at once.

`groups` finds runs that can be trained together: they differ only in name, seed, the `split_seed` of their task and the
settings of AdamW (learning rate, warm-up, decay, clipping).  Each member writes its own run folder, as if trained
alone.  It can be evaluated, resumed, or continued in another population.  Its losses are those of the run alone, to
rounding: batches, initial parameters and dropout are the same functions of its seed.

Members at different steps, or with other matrix products (`train/products.py`), form separate populations.
`trainer.run` trains single members, and runs that cannot be stacked (`stacked.unsupported_reason`).
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyhead import config as configs
from polyhead.config import Run
from polyhead.scale.population.stacked import Stack, unsupported_reason
from polyhead.scale.sweep.job import Failure
from polyhead.scale.sweep.jobs import prepare
from polyhead.spec.lazy import own_names
from polyhead.spec.shapes import check_number
from polyhead.train.checks import check, check_read_back
from polyhead.train.device import keep_memory, process
from polyhead.train.loop import Loop
from polyhead.train.member import Member
from polyhead.train.stop import DISK, MISTAKE, Interrupted, StopSignals
from polyhead.train.store.checkpoint import read_checkpoint
from polyhead.train.store.claims import claim
from polyhead.train.store.disk import DiskRetry, reason, tell
from polyhead.train.store.files import Damaged, set_aside
from polyhead.train.store.folder import RESULT, Result, finished, folder_of
from polyhead.train.store.saving import drop, last_whole
from polyhead.train.store.state import State, write_end
from polyhead.train.trainer import run

__dir__ = own_names(__name__)

LARGEST_STACK = 256
"""The most members of one population: each has two open files."""

Outcomes = dict[pathlib.Path, Result | Failure]

CACHED = 1 << 20
"""Activations between two layers that a CPU's cache holds.  They limit the networks of one pass, if at least `FEW`.

Steps of 24 networks on one core, milliseconds a network, at 2^15 activations each: 4.0 one by one, 1.6 by 8, 1.2 by 24;
at 2^17: 7.4, 4.7, 4.6; at 2^19: 12.3, 10.0, 12.8 for width 32 and no gain for width 64.
"""

OF_MEMBERS = ("lr", "weight_decay", "warmup", "final", "early_floor", "clip", "betas", "eps")
"""The settings of training that each member has of its own."""

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
    if at_once is not None:
        check_number("population", "at_once", at_once, 1)
    outcomes: Outcomes = {}
    members: list[Run] = []
    stop = StopSignals()
    work = _GroupTraining(outcomes, stop, progress, at_once)
    for config, place in zip(runs, places, strict=True):
        if (result := finished(place, configs.digest(config))) is not None:
            outcomes[place] = result
        else:
            members.append(dataclasses.replace(config, folder=str(place)))
    try:
        with stop:
            for part in [part for group in groups(members) for part in _of_one_step(group, outcomes)]:
                work.train(part)
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
    common = configs.to_dict(dataclasses.replace(config, name="", seed=0, folder=None))
    common["task"].pop("split_seed", None)  # it only changes data, and each member has its own data
    for name in OF_MEMBERS:
        del common["train"][name]
    return json.dumps(common, sort_keys=True)


def _of_one_step(group: Sequence[Run], outcomes: Outcomes) -> list[list[Run]]:
    """The members of a group, by step and matrix products.

    A run that another process trains, or whose folder cannot be written, is a failure.
    """
    parts: dict[tuple[int, bool | None], list[Run]] = {}
    for config in group:
        folder = folder_of(config)
        try:
            with claim(config, folder):
                found = _reached(config, folder)
            at = (found["step"], found.get("fast_products", False)) if found else (0, None)
            parts.setdefault(at, []).append(config)
        except (ValueError, OSError) as error:
            outcomes[folder] = _failure(config, error)
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


def _failure(config: Run, error: ValueError | OSError) -> Failure:
    """The failure of a member, in the form of a sweep's worker."""
    if isinstance(error, OSError):
        return Failure(config.name, folder_of(config), DISK, reason(error))
    return Failure(config.name, folder_of(config), MISTAKE, str(error))


@dataclass(frozen=True)
class _GroupTraining:
    """Trains the parts of the groups; the outcome of each member is put into `outcomes`."""

    outcomes: Outcomes
    stop: StopSignals
    progress: bool
    at_once: int | None

    def train(self, part: Sequence[Run]) -> None:
        """Train runs that can be trained together; a single run is trained as usual."""
        if len(part) > 1:
            self._together(part)
            return
        folder = folder_of(part[0])
        try:
            self.outcomes[folder] = run(part[0], progress=self.progress, resume=True)
        except (ValueError, OSError) as error:
            self.outcomes[folder] = _failure(part[0], error)

    def _together(self, part: Sequence[Run]) -> None:
        retry = DiskRetry(self.stop)
        with contextlib.ExitStack() as held:
            members = []
            for config in part:
                folder = folder_of(config)
                try:
                    check(config)
                    check_read_back(config)
                    held.enter_context(claim(config, folder))
                    config.task.keep(folder)
                    if (folder / RESULT).exists():  # a readable result would not be trained again
                        set_aside(folder / RESULT, f"{folder / RESULT} is damaged")
                    members.append(Member(config, folder, retry))
                except (ValueError, OSError) as error:
                    self.outcomes[folder] = _failure(config, error)
            if members:
                self._fit(members, held.enter_context(process(part[0])))

    def _fit(self, members: list[Member], device: torch.device) -> None:
        at_once = self.at_once or networks_at_once(members[0].config, device)
        if device.type == "cpu":
            keep_memory()
        loop = None
        try:
            networks = Stack([member.config for member in members], device, at_once)
            loop = Loop(members, networks, device, progress=self.progress, ended=self._ended)
            loop.progress.line(f"{loop.progress.name}: from step {loop.step}, {min(at_once, len(members))} in a pass")
            loop.fit(self.stop)
        except (ValueError, OSError) as error:  # of the model, of its scores, of the disk: other groups may be fine
            for member in loop.members if loop else members:
                if member.folder not in self.outcomes:
                    if isinstance(error, ValueError):
                        write_end(member.folder, State.FAILED, str(error))
                    self._ended(member, error)
        finally:
            if loop is not None:
                loop.close()

    def _ended(self, member: Member, outcome: Result | ValueError | OSError) -> None:
        if isinstance(outcome, Result):
            self.outcomes[member.folder], said = outcome, f"done ({member.folder})"
        else:
            self.outcomes[member.folder], said = _failure(member.config, outcome), f"failed: {outcome}"
        if self.progress:
            tell(f"{member.config.name}: {said}")


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
