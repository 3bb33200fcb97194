"""Workers as tasks of a Ray cluster (Ray Core).

A task runs the worker as a child process, which ends with the task, and returns its exit code.  If the task's process
or machine is lost, there is no exit code: the sweep restarts the run, and Ray places it on a machine with free
resources.
"""

import contextlib
import ctypes
import importlib
import inspect
import logging
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyhead.scale.sweep.engines import GONE, LOG, Handle, Resources, settings
from polyhead.spec.optional import optional
from polyhead.train.stop import DISK

if TYPE_CHECKING:
    from polyhead.config import Run

SECONDS = 10.0
"""Seconds to wait for an answer from the address of a cluster."""


class Ray:
    """The cluster at `address`: HOST:PORT, "auto" for that of this machine, "local" to start one here for this sweep.

    Without `workers` the cluster gets all runs, and trains as many in parallel as its resources allow.
    """

    pause, queues = 0.5, False

    def __init__(self, address: str, resources: Resources | None = None) -> None:
        self.address, self.resources = address, resources or Resources()
        self.tasks: list[_Task] = []
        self.began = False
        self.threads = 1

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        if self.address != "local":
            _answers(self.address)
        ray = _ray()
        if not ray.is_initialized():
            self._join(ray)
            self.began = True
        self.threads = threads or self.resources.cpus
        self.queues = workers is None
        self._demand(ray)
        return workers or len(runs)

    def _join(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self.address == "local":
            ray.init(address="local", include_dashboard=False, **quiet)
            return
        try:
            ray.init(address=self.address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"sweep: no Ray cluster at {self.address} ({reason})") from None

    def _demand(self, ray: Any) -> None:
        """Check that one run fits on some machine; otherwise Ray would wait forever."""
        wanted = self.resources
        for name, amount in (("CPU", wanted.cpus), ("GPU", wanted.gpus), ("memory", wanted.bytes)):
            most = max((node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]), default=0)
            if amount and amount > most:
                shown = f"{most / 2**30:.1f} GiB of memory" if name == "memory" else f"{most:g} {name}"
                raise ValueError(f"sweep: a run wants more than any machine of the Ray cluster has: {shown}")

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Handle]:
        ray, wanted = _ray(), self.resources
        work = inspect.unwrap(_work())  # without the annotation checks that tests wrap around it
        made = ray.remote(num_cpus=wanted.cpus, num_gpus=wanted.gpus, memory=wanted.bytes, max_retries=0)(work)
        own = settings(self.threads, {})
        begun = [_Task(made.remote(str(folder.absolute()), LOG, own), folder) for folder in folders]
        self.tasks = [task for task in self.tasks if task.code() is None] + begun
        return begun

    def stop(self, handles: Sequence[Handle]) -> str:
        ray = _ray()
        for task in self.tasks:
            ray.cancel(task.reference)  # interrupts the task, which lets its worker save
        left = [task.reference for task in self.tasks]
        if left:
            ray.wait(left, num_returns=len(left))
        return "stopped and saved"

    def close(self) -> None:
        ray: Any = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        for task in self.tasks:
            if task.code() is None:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.cancel(task.reference, force=True)
        if self.began:
            ray.shutdown()


class _Task:
    def __init__(self, reference: Any, folder: pathlib.Path) -> None:
        self.reference, self.folder = reference, folder
        self.ended: int | None = None

    def code(self) -> int | None:
        ray = _ray()
        if self.ended is None and ray.wait([self.reference], timeout=0)[0]:
            try:
                self.ended = int(ray.get(self.reference))
            except ray.exceptions.RayTaskError as error:  # its machine does not see the folder
                self.ended = DISK
                with contextlib.suppress(OSError), open(self.folder / LOG, "a", encoding="utf-8") as log:
                    log.write(f"polyhead: {error.cause}, on a machine of the Ray cluster\n")
            except ray.exceptions.RayError:
                self.ended = GONE
        return self.ended


def _ray() -> Any:
    with optional("sweep: --ray", "polyhead[ray]"):
        return importlib.import_module("ray")


def _answers(address: str) -> None:
    """Raise ValueError if no cluster answers at the address; Ray itself would retry for long, with many messages."""
    host, colon, port = address.rpartition(":")
    if address == "auto" or address.startswith("ray://"):
        return
    if not colon or not port.isdigit():
        raise ValueError(f"sweep: --ray wants HOST:PORT, auto or local but {address!r} came")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"sweep: no Ray cluster at {address} ({error})") from None


def _work() -> Callable[..., int]:
    """The function of a task.  A nested function is pickled by value, so machines only need Ray and our files."""

    def work(folder: str, log: str, own: dict[str, str]) -> int:
        import os
        import subprocess
        import sys
        import time

        paths = os.pathsep.join(filter(None, [own["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
        words = [sys.executable, "-m", "polyhead.scale.sweep.engines.ray", folder, str(os.getpid())]
        with open(os.path.join(folder, log), "ab") as file:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **own, "PYTHONPATH": paths},
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                time.sleep(0.1)
        except KeyboardInterrupt:  # cancelled
            process.terminate()
            process.wait()
        return int(process.returncode)

    return work


def main(words: Sequence[str]) -> int:
    """The worker of a task.  Arguments: FOLDER, and the parent process; the worker ends with it."""
    folder, parent = words[0], int(words[1])
    if sys.platform == "linux" and os.getppid() == parent:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent is already gone
        return GONE - 1
    from polyhead.train.__main__ import main as train

    return train([folder])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
