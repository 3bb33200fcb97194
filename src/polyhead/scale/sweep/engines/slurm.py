"""Workers as jobs of Slurm, through submitit: a job runs the worker as a child process.

Slurm sends SIGUSR2 before it preempts a job or ends it at its time limit.  The worker then saves, and submitit queues
the job again.
"""

import contextlib
import functools
import logging
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyhead.scale.sweep.engines import LOST, ExitCode, Resources, start_process
from polyhead.spec.optional import optional
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from polyhead.config import Run


class Slurm:
    """Jobs of at most `minutes`; a longer run resumes in the next job.  `partition`, `account`: Slurm's default.

    `cluster`: "slurm", or "local" for submitit's own executor on this machine, to try a sweep without Slurm.
    """

    poll_seconds = 2.0

    def __init__(
        self,
        resources: Resources | None = None,
        *,
        partition: str | None = None,
        account: str | None = None,
        minutes: int = 60,
        cluster: str = "slurm",
    ) -> None:
        check_number("sweep", "minutes", minutes, 1)
        self.resources = resources or Resources()
        if self.resources.gpus != int(self.resources.gpus):
            raise ValueError(f"sweep: gpus must be whole under Slurm, got {self.resources.gpus}")
        self.partition, self.account, self.minutes, self.cluster = partition, account, minutes, cluster
        self.executor: Any = None
        self.jobs: list[Any] = []

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None) -> int:
        with optional("sweep: --slurm", "polyhead[slurm]"):
            import submitit
        logging.getLogger("submitit").setLevel(logging.ERROR)
        try:
            self.executor = submitit.AutoExecutor(
                (folder / "slurm").absolute(), cluster=self.cluster, slurm_max_num_timeout=10**6
            )
        except RuntimeError as error:  # srun or sbatch is missing
            raise ValueError(f"sweep: --slurm needs a login node of Slurm ({error})") from None
        self.executor.update_parameters(**self.parameters())
        return workers or len(runs)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of a job for submitit; what is None is left to the cluster."""
        parameters = {
            "name": "polyhead",
            "timeout_min": self.minutes,
            "cpus_per_task": self.resources.cpus,
            "mem_gb": self.resources.memory,
            "slurm_gpus_per_node": int(self.resources.gpus) or None,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_signal_delay_s": min(90, 30 * self.minutes),
            "slurm_additional_parameters": {"requeue": True},
        }
        return {name: value for name, value in parameters.items() if value is not None}

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        """Submit one array of jobs."""
        try:
            jobs = self.executor.map_array(WorkerTask(self.resources.cpus), [str(path.absolute()) for path in folders])
        except Exception as error:  # submitit has no error class for a refusal by sbatch
            raise ValueError(f"sweep: sbatch refused the jobs ({str(error).strip().splitlines()[-1]})") from None
        self.jobs += jobs
        return [functools.partial(_exit_code, job) for job in jobs]

    def stop(self) -> str:
        """Cancel all jobs; Slurm lets their workers save."""
        for job in self.jobs:
            job.cancel(check=False)
        return "cancelled the jobs, whose workers save"

    def close(self) -> None:
        """Cancelled jobs end by themselves."""


def _exit_code(job: Any) -> int | None:
    if not job.done():
        return None
    try:
        return int(job.result())
    except Exception:  # submitit's own errors: the job left no result
        return LOST


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
