"""Workers as jobs of Slurm, through submitit: each job runs its worker as a child process.

Before Slurm preempts or ends a job it sends SIGUSR2: the worker saves, and submitit queues the job again."""

import contextlib
import functools
import logging
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

from polyhead.config import Run
from polyhead.scale.sweep.engines import Engine, ExitCode, Resources, code_of, train_in_child
from polyhead.spec.optional import optional
from polyhead.spec.shapes import check_number
from polyhead.train.stop import signals_to


class Slurm(Engine):
    """Jobs of Slurm; a run that takes longer than a job resumes in the next job.

    Args:
        minutes: The time limit of a job, 2 or more.
        cluster: "local" is submitit's own executor on this machine, to try a sweep without Slurm.
        options: Those of sbatch.
    """

    poll_seconds = 2.0

    def __init__(
        self, resources: Resources | None = None, *, minutes: int = 60, cluster: str = "slurm", **options: Any
    ) -> None:
        check_number("sweep", "minutes", minutes, 2)
        resources = resources or Resources()
        if resources.gpus != int(resources.gpus):
            raise ValueError(f"sweep: gpus must be whole under Slurm, got {resources.gpus}")
        self.cluster, self.cpus = cluster, resources.cpus
        # submitit leaves to the cluster what is None.
        self.parameters: dict[str, Any] = {"name": "polyhead", "timeout_min": minutes, "cpus_per_task": self.cpus}
        self.parameters |= {"mem_gb": resources.memory, "slurm_gpus_per_node": int(resources.gpus) or None}
        # Slurm may send the signal up to a minute too early, but a worker that still starts cannot save.
        options |= {"signal_delay_s": min(90, 60 * minutes - 90), "additional_parameters": {"requeue": True}}
        for name, value in options.items():
            self.parameters[f"slurm_{name}"] = value
        self.jobs: list[Any] = []

    def open(self, runs: Sequence[Run], folder: pathlib.Path, workers: int | None) -> int:
        with optional("sweep: --slurm", "polyhead[slurm]"):
            import submitit
        logging.getLogger("submitit").setLevel(logging.ERROR)
        job_files = (folder / "slurm").absolute()
        try:
            self.executor = submitit.AutoExecutor(job_files, cluster=self.cluster, slurm_max_num_timeout=10**6)
        except RuntimeError as error:  # srun or sbatch is missing
            raise ValueError(f"sweep: --slurm needs a login node of Slurm ({error})") from None
        self.executor.update_parameters(**self.parameters)
        return workers or len(runs)

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[ExitCode]:
        # A signal waits until the jobs are known, as `stop` cancels only those.
        arrived: list[int] = []
        jobs: list[Any] = []
        with signals_to(lambda number, _: arrived.append(number)):
            try:
                jobs = self.executor.map_array(WorkerTask(self.cpus), [str(path.absolute()) for path in folders])
            except Exception as error:  # submitit has no error class for a refusal by sbatch
                if not arrived:  # Ctrl-C ends sbatch, too
                    reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
                    raise ValueError(f"sweep: sbatch refused the jobs ({reason})") from None
            self.jobs += jobs
        for number in arrived:
            signal.raise_signal(number)
        return [functools.partial(_exit_code, job) for job in jobs]

    def stop(self) -> str:
        """Cancel all jobs; Slurm lets their workers save."""
        for job in self.jobs:
            job.cancel(check=False)
        return "cancelled the jobs, whose workers save"


class WorkerTask:
    """The work of a job: run the worker, and let it save when the job is about to end."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.workers: list[int] = []

    def __call__(self, folder: str) -> int:
        return train_in_child(folder, self.threads, {}, self.workers, preexec_fn=ignore_sigusr2)

    def checkpoint(self, folder: str) -> Any:
        """Let the worker save, and return what submitit queues again.  submitit calls this on SIGUSR2."""
        from submitit.helpers import DelayedSubmission

        ignore_sigusr2()  # a second signal would end this process before the worker has saved
        for worker in self.workers:  # before it starts there is nothing to save
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(worker, signal.SIGUSR1)
                os.waitpid(worker, 0)
        return DelayedSubmission(WorkerTask(self.threads), folder)


def ignore_sigusr2() -> None:
    """Ignore SIGUSR2 in this process.  Slurm sends it to all processes of a job, the worker included."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _exit_code(job: Any) -> int | None:
    if job.done():
        return code_of(job.result)
    return None
