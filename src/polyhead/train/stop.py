"""Signals that ask a run to save and stop, and the exit codes of its process.

SIGINT, SIGTERM and SIGHUP (a closed terminal) interrupt.
SIGUSR1 preempts: Slurm sends it some time before a job ends (`--signal=USR1@120`).
Under Slurm, SIGTERM also preempts.  A preempted run inside a Slurm batch job asks Slurm to queue the job again, unless
its environment has POLYHEAD_REQUEUE=0: then its sweep restarts it.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from polyhead.train.messages import write_notice

DONE, DISK, MISTAKE, LOST, HELD, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 73, 75, 130
"""Exit codes: done; the disk failed; invalid input, or the run diverged; another process of this run ended; another
process trains the run (EX_CANTCREAT); preempted and saved (EX_TEMPFAIL: try again); interrupted and saved."""

USUAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that interrupt."""

LAUNCHER = "POLYHEAD_LAUNCHER"
"""The process that started this one as one of several workers of a run (launch.py)."""

REQUEUE = "POLYHEAD_REQUEUE"
"""A sweep, which restarts its workers itself, sets this variable to "0" for them."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run was saved, unless `saved` is False, for example because the disk fails.

    The text says how to resume; `code` is the process's exit code.
    """

    code = INTERRUPTED
    saved = True


class Preempted(Interrupted):
    """SIGUSR1, or under Slurm SIGTERM: the run was saved, to be resumed elsewhere or later."""

    code = PREEMPTED


class StopSignals:
    """The signals ask the loop to save and stop; a second one that interrupts stops at once.

    `asked`: the received signal, 0 if none.
    """

    signals = USUAL + tuple(getattr(signal, name) for name in ("SIGUSR1",) if hasattr(signal, name))

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

    def interrupted(self, text: str, *, saved: bool = True) -> Interrupted:
        """The error that the loop raises after it saved, or failed to save."""
        usual = [number for number in USUAL if number != signal.SIGTERM or not slurm_job()]
        error = Interrupted(text) if self.asked in usual else Preempted(text)
        error.saved = saved
        return error


def leaving(*, again: bool = False) -> contextlib.AbstractContextManager[None]:
    """A context in which a signal ends the process at once with its exit code, unless a `StopSignals` handles it.

    Files on disk are complete at any time.  `again`: the same command resumes the run, so a preempted batch job asks to
    be queued again.  It raises no exception, because a library that is being imported may catch it.
    """
    return signals_to(functools.partial(_leave, again))


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


def _leave(again: bool, number: int, frame: object) -> None:
    # Another signal must not enter this handler again while it asks Slurm, which may take a minute.
    for other in StopSignals.signals:
        signal.signal(other, signal.SIG_IGN)
    stop = StopSignals()
    stop.asked = number
    code = stop.interrupted("").code
    if is_local_first():
        write_notice("polyhead: stopped at once; what was saved before is kept")
        message = requeue() if again and code == PREEMPTED else ""
        if message:
            write_notice(f"polyhead: {message}")
    os._exit(code)


def end_with_launcher() -> None:
    """Ask Linux to send this worker SIGTERM when the process that launched it dies, so that no worker stays behind."""
    if os.environ.get(LAUNCHER) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def is_local_first() -> bool:
    """Whether this process has local rank 0, or was started without torchrun and srun."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def slurm_job() -> str | None:
    """The Slurm job of this process, unless a sweep restarts it."""
    if os.environ.get(REQUEUE) == "0" or "SUBMITIT_EXECUTOR" in os.environ:
        return None
    return os.environ.get("SLURM_JOB_ID")


def requeue() -> str:
    """Ask Slurm to queue this batch job again; returns a message, or "" outside a batch job.

    Slurm then ends the job at once, so print all messages before.

    Only a running job asks: a cancelled job stays cancelled, and Slurm itself requeues a job that it preempts.
    """
    job = slurm_job()
    if job is None or os.environ.get("SLURM_PROCID", "0") != "0":  # one process asks for the whole job
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        state = _ask_slurm("squeue", "--noheader", "--jobs", job, "--format", "%T")
        if state != "RUNNING":
            return f"job {job} is {state.lower() or 'gone'}, so it is not queued again"
        _ask_slurm("scontrol", "requeue", job)
        return f"job {job} is queued again"
    return f"job {job} could not be queued again"


def _ask_slurm(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, encoding="utf-8"
    ).stdout.strip()
