"""Workers as jobs of Slurm, in one array, by submitit.

A job runs the worker as a child process.  Slurm sends SIGUSR2 before it preempts a job or ends it at its time limit.
The worker then saves, and submitit queues the job again.  After Ctrl-C the jobs continue; the same command finds them
again by the file slurm.json in each run's folder.

No pickles of jobs are read: the exit code of the worker is in a file, and squeue gives the job's state.
"""

import contextlib
import json
import logging
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyhead.scale.sweep.engines import GONE, LOG, Handle, Resources, command, settings
from polyhead.spec.optional import optional
from polyhead.spec.shapes import check_number
from polyhead.train.stop import INTERRUPTED, PREEMPTED

if TYPE_CHECKING:
    from polyhead.config import Run

NAME, PLACE, RECORD = "polyhead", "slurm", "slurm.json"
ENDED = {
    **dict.fromkeys(("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "REVOKED")),
    "CANCELLED": INTERRUPTED,
    "DEADLINE": INTERRUPTED,
    "PREEMPTED": PREEMPTED,
}
"""End states of a job -> the outcome of its worker; None: the worker's own exit code."""


class Slurm:
    """Jobs of at most `minutes`; a longer run resumes in the next job.  `partition`, `account`: Slurm's default."""

    queues = True

    def __init__(
        self,
        resources: Resources | None = None,
        *,
        partition: str | None = None,
        account: str | None = None,
        minutes: int = 60,
        pause: float = 5.0,
    ) -> None:
        check_number("sweep", "minutes", minutes, 1)
        self.resources = resources or Resources()
        if self.resources.gpus != int(self.resources.gpus):
            raise ValueError(f"sweep: Slurm gives whole GPUs but gpus is {self.resources.gpus}")
        self.partition, self.account, self.minutes, self.pause = partition, account, minutes, pause
        self.folder = pathlib.Path()
        self.executor: Any = None
        self.threads = 1
        self.states: dict[str, str] = {}
        self.asked, self.looks = 0.0, 0  # time of the last call of squeue, number of answers so far

    def open(self, runs: Sequence["Run"], folder: pathlib.Path, workers: int | None, threads: int | None) -> int:
        for program in ("sbatch", "squeue", "scontrol", "srun"):
            if shutil.which(program) is None:
                raise ValueError(f"sweep: --slurm needs {program}, which is not installed here: is this a login node?")
        with optional("sweep: --slurm", "polyhead[slurm]"):
            import submitit
        at_once = workers or len(runs)
        self.threads = threads or self.resources.cpus
        self.folder = (folder / PLACE).absolute()
        self.executor = submitit.AutoExecutor(self.folder, cluster="slurm", slurm_max_num_timeout=10**6)
        self.executor.update_parameters(**self._parameters(at_once))
        self._look()
        return at_once

    def _parameters(self, at_once: int) -> dict[str, Any]:
        wanted, paths = self.resources, settings(self.threads, os.environ)["PYTHONPATH"]
        chosen = {
            "mem_gb": wanted.memory,
            "slurm_gpus_per_node": int(wanted.gpus) or None,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
        }
        return {
            "name": NAME,
            "timeout_min": self.minutes,
            "cpus_per_task": wanted.cpus,
            "slurm_array_parallelism": at_once,
            "slurm_setup": [f"export PYTHONPATH={shlex.quote(paths)}"],
            "slurm_signal_delay_s": min(90, 30 * self.minutes),
            "slurm_additional_parameters": {"requeue": True},
            **{name: value for name, value in chosen.items() if value is not None},
        }

    def start(self, folders: Sequence[pathlib.Path]) -> Sequence[Handle]:
        """Reuse jobs of an earlier call that have not ended; the other runs form one array."""
        self._look()
        found = {folder: self._earlier(folder) for folder in folders}
        new = [folder for folder, job in found.items() if job is None]
        if new:
            for folder, job in zip(new, self._submit(new), strict=True):
                (folder / RECORD).write_text(json.dumps({"job": job}) + "\n", encoding="utf-8")
                found[folder] = job
        self.asked = 0.0
        return [_Job(self, str(found[folder])) for folder in folders]

    def _submit(self, folders: Sequence[pathlib.Path]) -> list[str]:
        logging.getLogger("submitit").setLevel(logging.ERROR)
        task = Task(self.threads)
        try:
            jobs = self.executor.map_array(task, [str(folder.absolute()) for folder in folders])
        except Exception as error:  # submitit has no error class for a refusal by sbatch
            said = [line for line in str(error).splitlines() if "error" in line] or [str(error)]
            raise ValueError(f"sweep: sbatch refused the jobs ({said[-1].strip()})") from None
        return [str(job.job_id) for job in jobs]

    def _earlier(self, folder: pathlib.Path) -> str | None:
        """The job of an earlier call that may still train this run."""
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            job = json.loads((folder / RECORD).read_text(encoding="utf-8")).get("job")
            if isinstance(job, str) and self.states.get(job, "COMPLETED") not in ENDED:
                return job
        return None

    def state(self, job: str) -> str | None:
        """The state of a job by squeue; None if squeue no longer lists it."""
        if time.monotonic() - self.asked > self.pause:
            self._look()
        return self.states.get(job)

    def _look(self) -> None:
        """Call squeue, which lists ended jobs for some minutes.  If it does not answer, its last answer holds."""
        asked = ["squeue", "--me", "--noheader", "--array", "--states=all", f"--name={NAME}", "--format=%i %T"]
        self.asked = time.monotonic()
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                asked, capture_output=True, text=True, check=True, timeout=60, encoding="utf-8"
            ).stdout
            self.states = dict(line.split(maxsplit=1) for line in said.splitlines() if " " in line)
            self.looks += 1

    def stop(self, handles: Sequence[Handle]) -> str:
        jobs = sorted({job.name.partition("_")[0] for job in handles if isinstance(job, _Job)})
        if not jobs:
            return "stopped"
        return f"left {len(handles)} jobs in Slurm, running or queued (scancel {' '.join(jobs)} ends them)"

    def close(self) -> None:
        pass


class _Job:
    def __init__(self, slurm: Slurm, name: str) -> None:
        self.slurm, self.name = slurm, name
        self.ends, self.looks = 0, slurm.looks  # consecutive polls in which it had ended, and number of polls

    def code(self) -> int | None:
        state = self.slurm.state(self.name)
        if self.slurm.looks == self.looks:
            return None
        self.looks = self.slurm.looks
        self.ends = self.ends + 1 if state is None or state in ENDED else 0
        if self.ends < 2:  # a requeued job may briefly look ended, and a shared disk may lag
            return None
        if state is not None and (code := ENDED[state]) is not None:
            return code
        try:
            return int(_record(self.slurm.folder, self.name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return GONE


def _record(folder: pathlib.Path, job: str) -> pathlib.Path:
    """The file with the exit code of a job's worker."""
    return folder / f"{job}.code"


class Task:
    """The work of a job: run the worker, and let it save on preemption."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.worker = 0

    def __call__(self, folder: str) -> int:
        from submitit import JobEnvironment

        record = _record(pathlib.Path(os.environ["SUBMITIT_FOLDER"]), JobEnvironment().job_id)
        record.unlink(missing_ok=True)
        with open(pathlib.Path(folder, LOG), "ab") as log:
            process = subprocess.Popen(
                command(pathlib.Path(folder)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=settings(self.threads, os.environ),
                preexec_fn=_deaf,
            )
        self.worker = process.pid
        code = os.waitstatus_to_exitcode(os.waitpid(self.worker, 0)[1])  # not Popen.wait: a signal may interrupt it
        process.returncode = code
        record.write_text(f"{code}\n", encoding="utf-8")
        return code

    def checkpoint(self, folder: str) -> Any:
        """Called by submitit on SIGUSR2; it queues the job again with the returned value."""
        from submitit.helpers import DelayedSubmission

        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a second signal would end the worker before it has saved
        if self.worker:  # 0: it has not started yet, and to `kill` 0 means all processes of this group
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.worker, signal.SIGUSR1)
                os.waitpid(self.worker, 0)
        return DelayedSubmission(Task(self.threads), folder)


def _deaf() -> None:
    """Ignore SIGUSR2 in the worker: Slurm sends it to all processes of a job, but `checkpoint` stops the worker."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
