"""Workers as tasks of a Ray cluster (Ray Core): a task runs the worker as a child process and returns its exit code.

Ray starts a task again if its machine is lost.  A worker that survives its task keeps the lock of its folder, so no
run is trained twice.
"""

import functools
import logging
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from polyhead.config import Run
from polyhead.extensions import IMPORTS
from polyhead.scale.sweep import engines
from polyhead.scale.sweep.engines import Engine, ExitCode, Resources, code_of
from polyhead.spec.optional import optional
from polyhead.train.store.folder import is_claimed

SAVING_SECONDS = 120
"""The time that workers have to save after Ctrl-C."""


class Ray(Engine):
    """A cluster of Ray; without `workers` it gets all runs, and trains as many in parallel as its resources allow.

    Args:
        address: HOST:PORT, "auto" for the cluster of this machine, or "local" to start one in this process.
    """

    poll_seconds = 0.5

    def __init__(self, address: str, resources: Resources | None = None) -> None:
        self.address, self.resources = address, resources or Resources()
        self.tasks: dict[pathlib.Path, Any] = {}

    def open(self, runs: Sequence[Run], folder: pathlib.Path, workers: int | None) -> int:
        with optional("sweep: --ray", "polyhead[ray]"):
            import ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
        try:
            ray.init(self.address, ignore_reinit_error=True, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"sweep: no Ray cluster at {self.address} ({reason})") from None
        # Tasks start without our imports: their function is sent by its code.
        ray.cloudpickle.register_pickle_by_value(engines)
        # Ray would wait forever for resources that no machine has.
        for name, amount in {"CPU": self.resources.cpus, "GPU": self.resources.gpus}.items():
            largest = max(node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"])
            if amount > largest:
                raise ValueError(f"sweep: a run needs {amount:g} {name}; the largest machine of Ray has {largest:g}")
        return workers or len(runs)

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        import ray

        cpus, memory = self.resources.cpus, self.resources.memory
        if memory is not None:
            memory = int(memory * 2**30)  # Ray counts bytes
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": self.resources.gpus, "memory": memory}
        train = ray.remote(**options)(engines.train_in_child)
        # Modules of the user's own tasks: their names, and where they lie.
        inherited = {name: os.environ[name] for name in ("PYTHONPATH", IMPORTS) if name in os.environ}
        workers: list[ExitCode] = []
        for folder in map(pathlib.Path.absolute, folders):
            self.tasks[folder] = train.remote(str(folder), cpus, inherited, [])
            workers.append(functools.partial(_exit_code, self.tasks[folder]))
        return workers

    def stop(self) -> str:
        """Interrupt all tasks, once: a second time would interrupt a task while its worker saves."""
        import ray

        tasks, self.tasks = self.tasks, {}
        for task in tasks.values():
            ray.cancel(task)
        if tasks:
            ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=SAVING_SECONDS)
        # Ray may call a task cancelled before its worker has saved: then the lock of the folder is free.
        deadline = time.monotonic() + SAVING_SECONDS
        while any(map(is_claimed, tasks)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return "stopped and saved"

    def close(self) -> None:
        if self.tasks:
            self.stop()


def _exit_code(task: Any) -> int | None:
    import ray

    if ray.wait([task], timeout=0)[0]:
        return code_of(functools.partial(ray.get, task))
    return None
