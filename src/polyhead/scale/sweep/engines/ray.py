"""Workers as tasks of a Ray cluster (Ray Core).

A task runs the worker as a child process and returns its exit code.  If the task is lost with its machine, the sweep
restarts the run.  A worker that survives its task keeps the lock of its folder, so no run is trained twice.
"""

import inspect
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyhead.config.extensions import IMPORTS
from polyhead.scale.sweep.engines import LOG, LOST, Resources, Worker, command, worker_environment
from polyhead.spec.optional import optional

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
        self.tasks: list[RayWorker] = []
        self.has_joined = False

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        with optional("sweep: --ray", "polyhead[ray]"):
            import ray
        self.threads = threads or self.resources.cpus
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options: dict[str, Any] = {"include_dashboard": False} if self.address == "local" else {}
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

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Worker]:
        import ray

        options: dict[str, Any] = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus, "max_retries": 0}
        if self.resources.memory is not None:
            options["memory"] = int(self.resources.memory * 2**30)
        task = ray.remote(**options)
        # Unwrapped: without the checks of annotations that a debugging hook may add.
        run_worker = task(inspect.unwrap(task_function()))
        # Modules of the user's own tasks: their names, and where they lie.
        inherited = {name: os.environ[name] for name in ("PYTHONPATH", IMPORTS) if name in os.environ}
        environment = worker_environment(self.threads, inherited)
        workers = []
        for folder in folders:
            words = command(folder.absolute())[1:]
            workers.append(RayWorker(run_worker.remote(words, environment, str(folder.absolute() / LOG))))
        self.tasks += workers
        return workers

    def stop(self) -> str:
        """Interrupt all tasks, which let their workers save, and wait for them."""
        import ray

        references = [task.reference for task in self.tasks if task.exit_code() is None]
        for reference in references:
            ray.cancel(reference)
        if references:
            ray.wait(references, num_returns=len(references), timeout=120)
        return "stopped and saved"

    def close(self) -> None:
        ray: Any = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            self.stop()
            if self.has_joined:
                ray.shutdown()


class RayWorker:
    """A task of Ray, waiting or running."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def exit_code(self) -> int | None:
        import ray

        ready, _ = ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            return int(ray.get(self.reference))
        except ray.exceptions.RayError:
            return LOST


def task_function() -> Callable[[list[str], dict[str, str], str], int]:
    """Return the function of a task.  A nested function is pickled by value, so a task starts without our imports."""

    def run_worker(words: list[str], environment: dict[str, str], log: str) -> int:
        import os
        import subprocess
        import sys
        import time

        with open(log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, *words], stdout=file, stderr=file, env={**os.environ, **environment}
            )
        try:
            while process.poll() is None:
                time.sleep(0.1)
        except KeyboardInterrupt:  # the task was cancelled
            process.terminate()
            process.wait()
        return int(process.returncode)

    return run_worker
