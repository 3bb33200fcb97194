"""One run after another in this process, for runs that take less time than starting a worker."""

import contextlib
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyhead.scale.sweep.engines import LOG, Handle
from polyhead.train.stop import INTERRUPTED, PREEMPTED

if TYPE_CHECKING:
    from polyhead.config import Run


class Here:
    """One run after another in this process.  A run that ends the process, such as out of memory, ends the sweep."""

    pause, queues = 0.0, False

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        if (workers or 1) != 1 or threads is not None:
            raise ValueError("sweep: runs in this process are one at a time, with the threads of each; take Local")
        return 1

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Handle]:
        return [_Ended(_train(folder)) for folder in folders]

    def stop(self, handles: Sequence[Handle]) -> str:
        return "stopped and saved"

    def close(self) -> None:
        """There are no workers to end."""


@dataclass(frozen=True)
class _Ended:
    how: int

    def code(self) -> int:
        return self.how


def _train(folder: pathlib.Path) -> int:
    """Train the run in `folder` with a log, as a worker does.  Raises KeyboardInterrupt after a signal, when saved."""
    from polyhead.train.__main__ import main

    with (
        open(folder / LOG, "a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        code = main([str(folder), "--quiet"])
    if code in (INTERRUPTED, PREEMPTED):
        raise KeyboardInterrupt
    return code
