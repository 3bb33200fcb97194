"""One run after another in this process: for runs so short that to start a worker takes longer than they do."""

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
    """What a run does to its process, such as running out of memory, it does to the sweep."""

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
        """Nobody is left behind."""


@dataclass(frozen=True)
class _Ended:
    how: int

    def code(self) -> int:
        return self.how


def _train(folder: pathlib.Path) -> int:
    """What the worker does, with its log; KeyboardInterrupt where it was asked to stop, and has saved."""
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
