"""The interface of engines, which start the workers of a sweep.

`local` starts processes on this machine, `ray` and `slurm` use a cluster, and `here` trains in this process.  A worker
is `python -P -m polyhead.train RUN` on any machine.  It locks the folder of its run, resumes from the checkpoint, and
ends with an exit code of train/stop.py.  All machines must see the folder of the sweep under the same path.
"""

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol, runtime_checkable

from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from polyhead.config import Run

LOG = "worker.log"
LOST = 256
"""Stands for the exit code of a worker that was lost with its machine or its job."""

ExitCode = Callable[[], int | None]
"""A worker: None until it ends; then its exit code, minus the number of a signal, or `LOST`."""


@runtime_checkable
class Engine(Protocol):
    """How workers are started and stopped."""

    poll_seconds: float
    """Seconds between two polls of the workers."""

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None) -> int:
        """Prepare to train `runs` in `folder`; return how many workers to start at a time.

        Raises ValueError if the engine cannot be used here.
        """

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        """Start or queue a worker for each of these run folders."""

    def stop(self) -> str:
        """Let all workers save and end, after Ctrl-C; return in words what happened to them."""

    def close(self) -> None:
        """End all workers that are left, also after an error."""


@dataclass(frozen=True)
class Resources:
    """The resources of a cluster for one run."""

    cpus: int = 1
    gpus: float = 0.0
    memory: float | None = None
    """Memory of a run in GiB; None for the default of the cluster."""

    def __post_init__(self) -> None:
        check_number("sweep", "cpus", self.cpus, 1)
        check_number("sweep", "gpus", self.gpus, 0)
        if self.memory is not None:
            check_number("sweep", "memory", self.memory, 0.001)


def command(folder: pathlib.Path) -> list[str]:
    """Return the command of a worker.

    With -P, a file such as random.py in the current folder does not replace a module of the same name.
    """
    return [sys.executable, "-P", "-m", "polyhead.train", str(folder)]


def worker_environment(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker, from that of its engine: our source, and the threads."""
    source = str(pathlib.Path(__file__).parents[4])
    paths = [source, environment.get("PYTHONPATH", "")]
    number = str(threads)
    python_path = os.pathsep.join(filter(None, paths))
    return {**environment, "PYTHONPATH": python_path, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}


def open_log(folder: pathlib.Path) -> IO[bytes]:
    """Open the log of a worker to append to it."""
    return open(folder / LOG, "ab")


def start_process(folder: pathlib.Path, threads: int, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a worker on this machine; its output goes to its log."""
    environment = worker_environment(threads, os.environ)
    with open_log(folder) as log:
        return subprocess.Popen(
            command(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, **options
        )
