"""One run after another in this process, for runs that take less time than the start of a worker."""

import contextlib
import functools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyhead.scale.sweep.engines import LOG, ExitCode
from polyhead.train.stop import INTERRUPTED, PREEMPTED, Interrupted

if TYPE_CHECKING:
    from polyhead.config import Run


class Here:
    """One run after another in this process.  A run that ends the process, such as out of memory, ends the sweep."""

    poll_seconds = 0.0

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None) -> int:
        if (workers or 1) != 1:
            raise ValueError("sweep: in this process, runs train one at a time; use Local")
        return 1

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        return [functools.partial(int, train(folder)) for folder in folders]

    def stop(self) -> str:
        return "stopped and saved"  # by the signal itself

    def close(self) -> None:
        """There are no workers to end."""


def train(folder: pathlib.Path) -> int:
    """Train the run in `folder` with a log, as a worker does; return its exit code.

    Raises Interrupted after a signal, when the run is saved.
    """
    from polyhead.train.__main__ import main

    with (
        open(folder / LOG, "a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        code = main([str(folder), "--quiet"])
    if code in (INTERRUPTED, PREEMPTED):
        raise Interrupted("stopped and saved", code)
    return code
