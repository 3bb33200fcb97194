"""Workers as processes of this machine: a crash ends one run only."""

import os
import pathlib
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyhead.scale.sweep.engines import LOG, Handle, command, settings

if TYPE_CHECKING:
    from polyhead.config import Run


class Local:
    """Worker processes: by default one per core, or a single one on an accelerator; they share the cores equally.

    No worker has more threads than OMP_NUM_THREADS: on cores that other programs use, threads wait for each other.
    """

    pause, queues = 0.2, False

    def __init__(self) -> None:
        self.threads = 1
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if workers is None:
            workers = max(1, min(cores, len(runs))) if _on_cpu(runs) else 1
        given = os.environ.get("OMP_NUM_THREADS", "")
        most = int(given) if given.isdecimal() and int(given) else cores
        self.threads = threads or max(1, min(most, cores // workers))
        return workers

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Handle]:
        return [self._start(folder) for folder in folders]

    def _start(self, folder: pathlib.Path) -> "_Worker":
        with open(folder / LOG, "ab") as log:
            process = subprocess.Popen(
                command(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=settings(self.threads, os.environ),
                start_new_session=True,  # Ctrl-C reaches only the sweep, which asks each worker to save
            )
        self.processes = [one for one in self.processes if one.poll() is None] + [process]
        return _Worker(process)

    def stop(self, handles: Sequence[Handle]) -> str:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        return "stopped and saved"

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


class _Worker:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def code(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        """Ask it to save and stop."""
        self.process.terminate()


def _on_cpu(runs: Sequence["Run"]) -> bool:
    from polyhead.train.device import pick_device

    return all(pick_device(run.device).type == "cpu" for run in runs)
