"""An engine starts the workers of a sweep: `local` on this machine, `ray`, `slurm`.

A worker is `python -m polyhead.train RUN` on any machine: it claims its folder, resumes from its checkpoint, and ends
with an exit code (stop.py).  All machines must see the folder of the sweep under the same name.

Nothing here imports torch, since a job of a cluster reads this file before its worker starts.
"""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from polyhead.config import Run

LOG = "worker.log"
LOST = 256
"""In place of an exit code: the worker is gone without one."""

MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}
"""glibc keeps freed memory instead of asking for it anew in every step: 12 % of a HYLA step at the paper's shape."""


@runtime_checkable
class Handle(Protocol):
    """One worker, from its request on."""

    def code(self) -> int | None:
        """None while it runs or waits; then its exit code, negative for a signal, or `LOST`."""


@runtime_checkable
class Engine(Protocol):
    """How workers are started, and how many at a time."""

    pause: float
    """Seconds between two polls of its workers."""
    queues: bool
    """Whether the engine takes the whole list at once and itself limits the number of workers that run."""

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        """Prepare to train `runs` below `folder`; the number of workers at a time.  ValueError if it is not usable."""

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Handle]:
        """Request a worker for each of these runs."""

    def stop(self, handles: Sequence[Handle]) -> str:
        """After Ctrl-C: stop these workers, and say what became of them."""

    def close(self) -> None:
        """Leave no worker behind, also after an error."""


@dataclass(frozen=True)
class Resources:
    """The share of a cluster that one run gets."""

    cpus: int = 1
    gpus: float = 0.0
    memory: float | None = None
    """In GiB; None: the default of the cluster."""

    def __post_init__(self) -> None:
        for name, least in (("cpus", 1), ("gpus", 0), ("memory", 0.001)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"sweep: {name} must be at least {least} but is {value}")


def command(folder: pathlib.Path, python: str = sys.executable) -> list[str]:
    """The command that starts a worker."""
    return [python, "-m", "polyhead.train", str(folder)]


def settings(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker, from the environment of its engine."""
    source = str(pathlib.Path(__file__).parents[4])
    paths = os.pathsep.join([source, *filter(None, [given.get("PYTHONPATH")])])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**MEMORY, **given, **own, "POLYHEAD_REQUEUE": "0"}  # the sweep starts it again, not the worker itself
