"""One run after another in this process, for runs that take less time than the start of a worker."""

import contextlib
import functools
import pathlib
from collections.abc import Sequence

from polyhead.config import Run
from polyhead.scale.sweep.engines import LOG, Engine, ExitCode
from polyhead.train.__main__ import main
from polyhead.train.stop import INTERRUPTED, PREEMPTED, Interrupted


class Here(Engine):
    """One run after another in this process.  A run that ends the process, such as out of memory, ends the sweep."""

    poll_seconds = 0.0

    def open(self, runs: Sequence[Run], folder: pathlib.Path, workers: int | None) -> int:
        if (workers or 1) != 1:
            raise ValueError("sweep: in this process, runs train one at a time; use Local")
        return 1

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        """Train the runs with logs, as workers do.  Raises Interrupted after a signal, when the run is saved."""
        workers: list[ExitCode] = []
        for folder in folders:
            with (
                open(folder / LOG, "a", encoding="utf-8") as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
            ):
                code = main([str(folder), "--quiet"])
            if code in (INTERRUPTED, PREEMPTED):
                raise Interrupted("stopped and saved", code)
            workers.append(functools.partial(int, code))  # a worker that has ended with this code
        return workers

    def stop(self) -> str:
        return "stopped and saved"  # by the signal itself
