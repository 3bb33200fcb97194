"""The work of a job of Slurm: it runs the worker as a child process.

Slurm sends SIGUSR2 before it preempts a job or ends it at its time limit.  The worker then saves, and submitit queues
the job again.
"""

import contextlib
import os
import pathlib
import signal
from typing import Any

from polyhead.scale.sweep.engines import start_process


class WorkerTask:
    """The work of a job: run the worker, and let it save when the job is about to end."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.worker = 0

    def __call__(self, folder: str) -> int:
        process = start_process(pathlib.Path(folder), self.threads, preexec_fn=ignore_sigusr2)
        self.worker = process.pid
        # Not Popen.wait: `checkpoint` may interrupt it while it holds its lock.
        try:
            _, status = os.waitpid(self.worker, 0)
        except KeyboardInterrupt:  # cancelled by submitit's local executor
            process.terminate()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode

    def checkpoint(self, folder: str) -> Any:
        """Let the worker save, and return what submitit queues again.  submitit calls this on SIGUSR2."""
        from submitit.helpers import DelayedSubmission

        ignore_sigusr2()  # a second signal would end this process before the worker has saved
        if self.worker:  # before the worker starts there is nothing to save, and 0 would mean this whole group
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.worker, signal.SIGUSR1)
                os.waitpid(self.worker, 0)
        return DelayedSubmission(WorkerTask(self.threads), folder)


def ignore_sigusr2() -> None:
    """Ignore SIGUSR2 in this process.  Slurm sends it to all processes of a job, the worker included."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
