"""Signals that ask a run to save itself and stop, and what its process then says to who started it.

SIGINT and SIGTERM interrupt.  SIGUSR1 preempts: Slurm sends it some time before it takes the machine away
(`--signal=USR1@120`); under Slurm SIGTERM means the same.  A run that was preempted wants to go on, so inside a Slurm
batch job it asks for that job to be queued again, unless REQUEUE is "0" in its environment: then somebody else does.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

DONE, DISK, MISTAKE, HELD, PREEMPTED, INTERRUPTED = 0, 1, 2, 73, 75, 130
"""Exit codes: done; the disk failed; a mistake in the input, or a run that diverged; another process trains the run
(EX_CANTCREAT); preempted and saved (EX_TEMPFAIL: try again); interrupted and saved."""

USUAL = (signal.SIGINT, signal.SIGTERM)

REQUEUE = "POLYHEAD_REQUEUE"
"""Whoever restarts its workers itself (a sweep) sets this variable to "0" for them."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run has saved itself, unless `saved` is False, as where the disk fails.

    The text says how to go on, `code` is the process's exit code.
    """

    code = INTERRUPTED
    saved = True


class Preempted(Interrupted):
    """SIGUSR1, or under Slurm SIGTERM: the run has saved itself and wants to go on elsewhere or later."""

    code = PREEMPTED


class Stop:
    """SIGINT, SIGTERM and SIGUSR1 ask the loop to save and stop; a second of the first two stops at once.

    `asked`: the signal that came, 0 while none has.
    """

    signals = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

    def __init__(self) -> None:
        self.asked = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._ask) for number in self.signals}
        return self

    def _ask(self, number: int, frame: object) -> None:
        if number in USUAL and self.asked in USUAL:
            raise KeyboardInterrupt
        if number in USUAL or not self.asked:
            self.asked = number

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def interrupted(self, text: str, *, saved: bool = True) -> Interrupted:
        """What the loop raises when it has saved itself, or could not."""
        usual = (signal.SIGINT,) if slurm_job() else USUAL
        error = Interrupted(text) if self.asked in usual else Preempted(text)
        error.saved = saved
        return error


@contextlib.contextmanager
def leaving(*, again: bool = False) -> Iterator[None]:
    """Within, but for `Stop`, a signal ends the process at once, with its exit code: everything on the disk is whole.

    `again`: the same command would go on, so a batch job that is preempted asks to be queued again.
    By no exception: libraries that are just being imported may swallow one, and go on with half of themselves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, functools.partial(_leave, again)) for number in Stop.signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(again: bool, number: int, frame: object) -> None:
    for other in Stop.signals:
        signal.signal(other, signal.SIG_IGN)
    stop = Stop()
    stop.asked = number
    code = stop.interrupted("").code
    if is_local_first():
        print("polyhead: stopped at once; what was saved before is kept", file=sys.stderr, flush=True)
        if again and code == PREEMPTED and (said := requeue()):
            print(f"polyhead: {said}", file=sys.stderr, flush=True)
    os._exit(code)


def is_local_first() -> bool:
    """Whether torchrun or srun started this process as the first of its machine, or nobody did."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def slurm_job() -> str | None:
    """The Slurm job that this process belongs to, unless somebody else restarts it."""
    others = os.environ.get(REQUEUE) == "0" or "SUBMITIT_EXECUTOR" in os.environ
    return None if others else os.environ.get("SLURM_JOB_ID")


def requeue() -> str:
    """Ask Slurm to queue this batch job again, and what came of it in words; nothing outside a batch job.

    Slurm then ends the job at once, so whatever is to be said must have been said.

    Only a job that is still running asks: one that was cancelled stays so, and one that Slurm itself queues again needs
    nobody.
    """
    job = slurm_job()
    if job is None or os.environ.get("SLURM_PROCID", "0") != "0":  # one process asks for all
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
