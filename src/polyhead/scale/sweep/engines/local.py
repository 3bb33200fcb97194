"""Workers as processes of this machine, so that a crash ends one run only."""

import os
import pathlib
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyhead.scale.sweep.engines import Worker, start_process

if TYPE_CHECKING:
    from polyhead.config import Run


class Local:
    """Worker processes: one per core by default, or a single one on an accelerator.  They share the cores equally.

    No worker has more threads than OMP_NUM_THREADS: on cores that other programs use, threads wait for each other.
    """

    poll_seconds = 0.2

    def __init__(self) -> None:
        self.threads = 1
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        from polyhead.train.device import pick_device

        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        if workers is None:
            all_on_cpu = all(pick_device(run.device).type == "cpu" for run in runs)
            workers = max(1, min(cores, len(runs))) if all_on_cpu else 1
        max_threads = cores
        if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
            max_threads = int(os.environ["OMP_NUM_THREADS"])
        self.threads = threads or max(1, min(max_threads, cores // workers))
        return workers

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Worker]:
        processes = [start_process(folder, self.threads) for folder in folders]
        self.processes += processes
        return [LocalWorker(process) for process in processes]

    def stop(self) -> str:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        return "stopped and saved"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class LocalWorker:
    """A process of this machine."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def exit_code(self) -> int | None:
        return self.process.poll()
