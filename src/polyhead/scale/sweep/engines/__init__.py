"""What starts the workers of a sweep: an engine.  `local` on this machine, `ray`, `slurm`.

A worker is `python -m polyhead.train RUN`, wherever it runs: it claims its folder, goes on from its checkpoint, and
says by its exit code (stop.py) how it ended.  All machines must see the folder of the sweep under the same name.

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
"""Instead of an exit code, which is less: the worker is gone, and nobody knows how it ended."""

MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}
"""glibc keeps freed memory instead of asking for it anew in every step: 12 % of a HYLA step at the paper's shape."""


@runtime_checkable
class Handle(Protocol):
    """One worker, from the moment it was asked for."""

    def code(self) -> int | None:
        """None while it works or waits for its turn; its exit code, negative for a signal; `LOST`."""


@runtime_checkable
class Engine(Protocol):
    """How workers are started, and how many at a time."""

    pause: float
    """Seconds between two looks at its workers."""
    queues: bool
    """It is given the whole list at once and sees itself that no more of it than the limit works at a time."""

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        """Get ready to train `runs` below `folder`; how many work at a time.  ValueError: it cannot be used here."""

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Handle]:
        """Ask for a worker for each of these runs."""

    def stop(self, handles: Sequence[Handle]) -> str:
        """After Ctrl-C: what became of these workers, which have not ended."""

    def close(self) -> None:
        """Leave nobody behind who should not go on, also after an error."""


@dataclass(frozen=True)
class Resources:
    """What one run gets of a cluster."""

    cpus: int = 1
    gpus: float = 0.0
    memory: float | None = None
    """In GiB; None is what the cluster gives by default."""

    def __post_init__(self) -> None:
        for name, least in (("cpus", 1), ("gpus", 0), ("memory", 0.001)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"sweep: {name} must be at least {least} but is {value}")


def command(folder: pathlib.Path, python: str = sys.executable) -> list[str]:
    """What a worker is started by."""
    return [python, "-m", "polyhead.train", str(folder)]


def settings(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker, made of that of whoever starts it."""
    source = str(pathlib.Path(__file__).parents[4])
    paths = os.pathsep.join([source, *filter(None, [given.get("PYTHONPATH")])])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**MEMORY, **given, **own, "POLYHEAD_REQUEUE": "0"}  # the sweep starts it again, not the worker itself
