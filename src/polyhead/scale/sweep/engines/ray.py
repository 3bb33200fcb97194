"""Workers as tasks of a Ray cluster (Ray Core).

A task runs the worker as a child process and returns its exit code.  If the task is lost with its machine, the sweep
restarts the run.  A worker that survives its task keeps the lock of its folder, so no run is trained twice.
"""

import functools
import logging
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyhead.scale.sweep.engines import LOST, ExitCode, Resources
from polyhead.scale.sweep.engines.ray_task import task_arguments, task_function
from polyhead.spec.optional import optional
from polyhead.train.store.claims import is_claimed

if TYPE_CHECKING:
    from polyhead.config import Run


class Ray:
    """The cluster at `address`: HOST:PORT, "auto" for that of this machine, "local" to start one here for this sweep.

    Without `workers` the cluster gets all runs, and trains as many in parallel as its resources allow.
    """

    poll_seconds = 0.5

    def __init__(self, address: str, resources: Resources | None = None) -> None:
        self.address = address
        self.resources = resources or Resources()
        self.threads = self.resources.cpus
        self.tasks: list[Any] = []
        self.folders: list[pathlib.Path] = []
        self.has_joined = False

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        with optional("sweep: --ray", "polyhead[ray]"):
            import ray
        self.threads = threads or self.resources.cpus
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options: dict[str, Any] = {}
            if self.address == "local":
                options["include_dashboard"] = False
            try:
                ray.init(self.address, logging_level=logging.ERROR, log_to_driver=False, **options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(f"sweep: no Ray cluster at {self.address} ({reason})") from None
            self.has_joined = True
        # Ray would wait forever for resources that no machine has.
        demand = {"CPU": self.resources.cpus, "GPU": self.resources.gpus}
        for name, amount in demand.items():
            largest = max(node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"])
            if amount > largest:
                raise ValueError(f"sweep: a run needs {amount:g} {name}; the largest machine of Ray has {largest:g}")
        return workers or max(1, len(runs))

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        import ray

        options: dict[str, Any] = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus, "max_retries": 0}
        if self.resources.memory is not None:
            options["memory"] = int(self.resources.memory * 2**30)
        run_worker = ray.remote(**options)(task_function())
        workers = []
        self.folders += folders
        for folder in folders:
            task = run_worker.remote(*task_arguments(folder.absolute(), self.threads))
            self.tasks.append(task)
            workers.append(functools.partial(_exit_code, task))
        return workers

    def stop(self) -> str:
        """Interrupt all tasks, which let their workers save, and wait for them."""
        import ray

        running = []
        for task in self.tasks:
            if _exit_code(task) is None:
                ray.cancel(task)
                running.append(task)
        self.tasks = []  # once: a second cancel would interrupt the task while its worker saves
        if running:
            ray.wait(running, num_returns=len(running), timeout=120)
        # Ray may call a task cancelled before its worker has saved: then the lock of the folder is free.
        deadline = time.monotonic() + 120
        while any(map(is_claimed, self.folders)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return "stopped and saved"

    def close(self) -> None:
        ray: Any = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            self.stop()
            if self.has_joined:
                ray.shutdown()


def _exit_code(reference: Any) -> int | None:
    import ray

    ended, _ = ray.wait([reference], timeout=0)
    if not ended:
        return None
    try:
        return int(ray.get(reference))
    except ray.exceptions.RayError:
        return LOST
