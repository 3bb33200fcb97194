"""Workers as processes of this machine, so that a crash ends one run only."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from polyhead.config import Run
from polyhead.scale.sweep.engines import Engine, ExitCode, start_process, worker_environment


class Local(Engine):
    """Worker processes: one per core by default, or a single one on an accelerator.  They share the cores equally.

    No worker has more threads than OMP_NUM_THREADS: on cores that other programs use, threads wait for each other.
    """

    poll_seconds = 0.2

    def __init__(self) -> None:
        self.threads = 1
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self, runs: Sequence[Run], folder: pathlib.Path, workers: int | None) -> int:
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        if workers is None:
            from polyhead.train.device import pick_device  # imports torch, which the job of a cluster does without

            workers = max(1, min(cores, len(runs)))
            # On an accelerator, workers would take each other's memory.
            if any(pick_device(run.device).type != "cpu" for run in runs):
                workers = 1
        max_threads = cores
        if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
            max_threads = int(os.environ["OMP_NUM_THREADS"])
        self.threads = max(1, min(max_threads, cores // workers))
        return workers

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        # In sessions of their own: Ctrl-C reaches only the sweep, which asks each worker to save.
        environment = worker_environment(self.threads, os.environ)
        workers: list[ExitCode] = []
        for folder in folders:
            self.processes.append(start_process(folder, environment, start_new_session=True))
            workers.append(self.processes[-1].poll)
        return workers

    def stop(self) -> str:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        if sys.platform == "win32":  # there a process is ended without being asked
            return "stopped; each run resumes from its last checkpoint"
        return "stopped and saved"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
