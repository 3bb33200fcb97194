"""The interface of engines, which start the workers of a sweep.

`local` starts processes on this machine, `ray` and `slurm` use a cluster, and `here` trains in this process.  A worker
is `python -P -m polyhead.train RUN` on any machine.  It locks the folder of its run, resumes from the checkpoint, and
ends with an exit code of train/stop.py.  All machines must see the folder of the sweep under the same path.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from polyhead.config import Run
from polyhead.spec.shapes import check_number

LOG = "worker.log"
NO_EXIT_CODE = 256
"""Stands for the exit code of a worker that was lost with its machine or its job."""

ExitCode = Callable[[], int | None]
"""A worker: None until it ends; then its exit code, minus the number of a signal, or `NO_EXIT_CODE`."""


@runtime_checkable
class Engine(Protocol):
    """How workers are started and stopped."""

    poll_seconds: float
    """Seconds between two polls of the workers."""

    def open(self, runs: Sequence[Run], folder: pathlib.Path, workers: int | None) -> int:
        """Prepare to train `runs` in `folder`; return how many workers to start at a time.

        Raises:
            ValueError: If the engine cannot be used here.
        """

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        """Start or queue a worker for each of these run folders."""

    def stop(self) -> str:
        """Let all workers save and end, after Ctrl-C; return in words what happened to them."""

    def close(self) -> None:
        """End all workers that are left, also after an error.  By default there are none."""
        return


@dataclass(frozen=True)
class Resources:
    """The resources of a cluster for one run."""

    cpus: int = 1
    gpus: float = 0.0
    memory: float | None = None
    """Memory of a run in GiB; None for the default of the cluster."""

    def __post_init__(self) -> None:
        for name, minimum in (("cpus", 1), ("gpus", 0), ("memory", 0.001)):
            if getattr(self, name) is not None:
                check_number("sweep", name, getattr(self, name), minimum)


def worker_environment(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker, from that of its engine: our source, and the threads."""
    source = str(pathlib.Path(__file__).parents[4])
    python_path = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    return {**environment, "PYTHONPATH": python_path, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def start_process(folder: pathlib.Path, environment: Mapping[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a worker on this machine; its output goes to its log."""
    # With -P, a file such as random.py in the current folder does not replace a module of the same name.
    command = [sys.executable, "-P", "-m", "polyhead.train", str(folder)]
    with open(folder / LOG, "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, **options)


def train_in_child(
    folder: str, threads: int, environment: Mapping[str, str], workers: list[int], **options: Any
) -> int:
    """Train a run on a machine of a cluster, in a child process; return its exit code.  An interruption lets it save.

    Args:
        environment: Added to that of the machine.
        workers: Gets the number of the process.
    """
    # A sweep in the background of a script hands SIGINT down as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = worker_environment(threads, {**os.environ, **environment})
    process = start_process(pathlib.Path(folder), environment, **options)
    workers.append(process.pid)
    try:
        while process.poll() is None:  # `wait` would not hear an interruption that is no signal
            time.sleep(0.1)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
    return process.returncode


def code_of(result: Callable[[], Any]) -> int:
    """Return the exit code that is the result of a cluster's task, or NO_EXIT_CODE if it left none."""
    try:
        return int(result())
    except Exception:  # each cluster has errors of its own
        return NO_EXIT_CODE
