"""The work of a task of Ray: it runs the worker as a child process."""

import inspect
import os
import pathlib
from typing import Any

from polyhead.config.extensions import IMPORTS
from polyhead.scale.sweep.engines import LOG, command, worker_environment


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

    return inspect.unwrap(run_worker)  # without the checks of annotations that a debugging hook may add


def task_arguments(folder: pathlib.Path, threads: int) -> tuple[list[str], dict[str, str], str]:
    """The arguments of `run_worker`: command, environment and log of a worker."""
    # Modules of the user's own tasks: their names, and where they lie.
    inherited = {name: os.environ[name] for name in ("PYTHONPATH", IMPORTS) if name in os.environ}
    return command(folder)[1:], worker_environment(threads, inherited), str(folder / LOG)
