"""Signals that ask a run to save and stop, and the exit codes of its process.

SIGINT, SIGTERM and SIGHUP (a closed terminal) interrupt.
SIGUSR1 preempts: Slurm sends it some time before a job ends (`--signal=USR1@120`), and the exit code says so.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from polyhead.train.messages import write_notice

DONE, DISK, MISTAKE, LOST, HELD, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 73, 75, 130
"""Exit codes: done; the disk failed; invalid input, or the run diverged; another process of this run ended; another
process trains the run (EX_CANTCREAT); preempted and saved (EX_TEMPFAIL: try again); interrupted and saved."""

DIVERGED = "lower train.lr or set train.clip"
"""The end of the message of a run that diverged."""

USUAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that interrupt."""

LAUNCHER = "POLYHEAD_LAUNCHER"
"""The process that started this one as one of several workers of a run (launch.py)."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop, and it was saved.  The text says how to resume; `code` is the exit code."""

    def __init__(self, text: str, code: int = INTERRUPTED) -> None:
        super().__init__(text)
        self.code = code


class StopSignals:
    """Signals `asked` (0 if none) the loop to save and stop; a second one that interrupts stops at once."""

    signals = (*USUAL, signal.SIGUSR1) if hasattr(signal, "SIGUSR1") else USUAL

    def __init__(self) -> None:
        self.asked = 0
        self.handled = contextlib.ExitStack()

    def __enter__(self) -> "StopSignals":
        self.handled.enter_context(signals_to(self._ask))
        return self

    def _ask(self, number: int, frame: object) -> None:
        # A second Ctrl-C asks to end without saving.  A preemption never hides an earlier interruption.
        if number in USUAL and self.asked in USUAL:
            raise KeyboardInterrupt
        if number in USUAL or not self.asked:
            self.asked = number

    def __exit__(self, *error: object) -> None:
        self.handled.close()


def leaving() -> contextlib.AbstractContextManager[None]:
    """A context in which a signal ends the process at once with its exit code, unless a `StopSignals` handles it.

    It raises no exception, because a library that is being imported may catch it.
    """
    return signals_to(_leave)


@contextlib.contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A context in which `handler` gets the signals, if this is the main thread: Python allows it in no other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    for number in StopSignals.signals:
        if number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup: the run outlives its terminal
        before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _leave(number: int, frame: object) -> None:
    if is_local_first():
        write_notice("polyhead: stopped at once; what was saved before is kept")
    os._exit(code_of(number))


def code_of(number: int) -> int:
    """The exit code after this signal."""
    return INTERRUPTED if number in USUAL else PREEMPTED


def end_with_launcher() -> None:
    """Ask Linux to send this worker SIGTERM when the process that launched it dies, so that no worker stays behind."""
    if os.environ.get(LAUNCHER) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def is_local_first() -> bool:
    """Whether this process has local rank 0, or was started without torchrun and srun."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
