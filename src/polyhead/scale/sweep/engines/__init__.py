"""An engine starts the workers of a sweep: `local` on this machine, `ray`, `slurm`.

A worker is `python -m polyhead.train RUN` on any machine: it claims its folder, resumes from its checkpoint, and ends
with an exit code (stop.py).  All machines must see the folder of the sweep under the same name.

Nothing here imports torch, because a cluster's job imports this file before its worker starts.
"""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from polyhead.spec.shapes import check_number
from polyhead.train.stop import REQUEUE

if TYPE_CHECKING:
    from polyhead.config import Run

LOG = "worker.log"
GONE = 256
"""Stands for the exit code of a worker that disappeared."""


@runtime_checkable
class Handle(Protocol):
    """One worker, requested or running."""

    def code(self) -> int | None:
        """None while it waits or runs; then its exit code (negative for a signal), or `GONE`."""


@runtime_checkable
class Engine(Protocol):
    """How workers are started, and how many at a time."""

    pause: float
    """Seconds between two polls of its workers."""
    queues: bool
    """Whether the engine accepts all runs at once and limits the number of running workers itself."""

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        """Prepare to train `runs` in `folder`; returns the number of parallel workers.  ValueError if not usable."""

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Handle]:
        """Request a worker for each of these runs."""

    def stop(self, handles: Sequence[Handle]) -> str:
        """After Ctrl-C: stop these workers, and return a message about them."""

    def close(self) -> None:
        """End all workers, also after an error."""


@dataclass(frozen=True)
class Resources:
    """The resources of a cluster for one run."""

    cpus: int = 1
    gpus: float = 0.0
    memory: float | None = None
    """Memory of a run in GiB; None: the default of the cluster."""

    @property
    def bytes(self) -> int | None:
        """The memory in bytes."""
        return None if self.memory is None else int(self.memory * 2**30)

    def __post_init__(self) -> None:
        for name, least in (("cpus", 1), ("gpus", 0), ("memory", 0.001)):
            if (value := getattr(self, name)) is not None:
                check_number("sweep", name, value, least)


def command(folder: pathlib.Path) -> list[str]:
    """The command that starts a worker."""
    return [sys.executable, "-m", "polyhead.train", str(folder)]


def settings(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker, from the environment of its engine."""
    source = str(pathlib.Path(__file__).parents[4])
    paths = os.pathsep.join([source, *filter(None, [given.get("PYTHONPATH")])])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**given, **own, REQUEUE: "0"}  # the sweep restarts it, not the worker itself
