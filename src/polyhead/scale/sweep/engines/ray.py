"""Workers as tasks of a Ray cluster (Ray Core): a task runs the worker as a child process and returns its exit code.

Ray starts a task again if its machine is lost.  A worker that survives its task keeps the lock of its folder, so no
run is trained twice.
"""

import functools
import inspect
import logging
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyhead.extensions import IMPORTS
from polyhead.scale.sweep.engines import LOG, LOST, ExitCode, Resources, command, worker_environment
from polyhead.spec.optional import optional
from polyhead.train.store.folder import is_claimed

if TYPE_CHECKING:
    from polyhead.config import Run

SAVING_SECONDS = 120
"""The time that workers have to save after Ctrl-C."""


class Ray:
    """The cluster at `address`: HOST:PORT, "auto" for that of this machine, "local" to start one here for this sweep.

    Without `workers` the cluster gets all runs, and trains as many in parallel as its resources allow.
    """

    poll_seconds = 0.5

    def __init__(self, address: str, resources: Resources | None = None) -> None:
        self.address = address
        self.resources = resources or Resources()
        self.tasks: list[Any] = []
        self.folders: list[pathlib.Path] = []
        self.has_joined = False

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None) -> int:
        with optional("sweep: --ray", "polyhead[ray]"):
            import ray
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                ray.init(self.address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(f"sweep: no Ray cluster at {self.address} ({reason})") from None
            self.has_joined = True
        # Ray would wait forever for resources that no machine has.
        for name, amount in {"CPU": self.resources.cpus, "GPU": self.resources.gpus}.items():
            largest = max(node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"])
            if amount > largest:
                raise ValueError(f"sweep: a run needs {amount:g} {name}; the largest machine of Ray has {largest:g}")
        return workers or len(runs)

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        import ray

        options: dict[str, Any] = {"num_cpus": self.resources.cpus, "num_gpus": self.resources.gpus}
        if self.resources.memory is not None:
            options["memory"] = int(self.resources.memory * 2**30)
        run_worker = ray.remote(**options)(inspect.unwrap(task_function()))
        # Modules of the user's own tasks: their names, and where they lie.
        inherited = {name: os.environ[name] for name in ("PYTHONPATH", IMPORTS) if name in os.environ}
        environment = worker_environment(self.resources.cpus, inherited)
        workers: list[ExitCode] = []
        for folder in map(pathlib.Path.absolute, folders):
            self.folders.append(folder)
            self.tasks.append(run_worker.remote(command(folder)[1:], environment, str(folder / LOG)))
            workers.append(functools.partial(_exit_code, self.tasks[-1]))
        return workers

    def stop(self) -> str:
        """Interrupt all tasks, which let their workers save, and wait for them."""
        import ray

        running = [task for task in self.tasks if _exit_code(task) is None]
        self.tasks = []  # once: a second cancel would interrupt the task while its worker saves
        for task in running:
            ray.cancel(task)
        if running:
            ray.wait(running, num_returns=len(running), timeout=SAVING_SECONDS)
        # Ray may call a task cancelled before its worker has saved: then the lock of the folder is free.
        deadline = time.monotonic() + SAVING_SECONDS
        while any(map(is_claimed, self.folders)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return "stopped and saved"

    def close(self) -> None:
        ray: Any = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            self.stop()
            if self.has_joined:
                ray.shutdown()


def task_function() -> Any:
    """Return the function of a task.  A nested function is pickled by value, so a task starts without our imports."""

    def run_worker(words: list[str], environment: dict[str, str], log: str) -> int:
        import os
        import signal
        import subprocess
        import sys
        import time

        # Ray cancels by SIGINT, which a sweep in the background of a script hands down as ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(log, "ab") as file:
            environment = {**os.environ, **environment}
            process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=file, env=environment)
        try:
            while process.poll() is None:
                time.sleep(0.1)
        except KeyboardInterrupt:  # the task was cancelled
            process.terminate()
            process.wait()
        return int(process.returncode)

    return run_worker


def _exit_code(reference: Any) -> int | None:
    import ray

    ended, _ = ray.wait([reference], timeout=0)
    if not ended:
        return None
    try:
        return int(ray.get(reference))
    except ray.exceptions.RayError:
        return LOST
