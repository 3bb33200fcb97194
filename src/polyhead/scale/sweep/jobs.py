"""Many runs in parallel: an engine starts a worker for each, on this machine or on a cluster.

Finished runs are skipped and others continue from their checkpoints, so the same call resumes a sweep.  A run that
fails does not stop the others.
"""

import contextlib
import pathlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from polyhead.config import Run, check_run
from polyhead.extensions import handed_on
from polyhead.scale.sweep.engines import Engine
from polyhead.scale.sweep.engines.local import Local
from polyhead.scale.sweep.job import Failure, Job, State
from polyhead.scale.sweep.naming import labels
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.spec.shapes import check_number
from polyhead.train.stop import INTERRUPTED, Interrupted, code_of, signals_to
from polyhead.train.store.files import check_folder
from polyhead.train.store.folder import FolderInUse, Result, claim, clear, folder_in_sweep, is_claimed


# ------------------------------------------------------------------------------------------------------------- the call
def sweep(
    runs: Sequence[Run],
    folder: str | pathlib.Path,
    *,
    workers: int | None = None,
    progress: bool = True,
    again: bool = False,
    engine: Engine | None = None,
) -> list[Result | Failure]:
    """Train every run in `folder`/NAME-DIGEST; return results or failures in the order of `runs`.

    Args:
        workers: How many train in parallel; by default the engine decides.
        again: Delete earlier training and start over.
        engine: By default `Local`.

    Raises:
        ValueError: If the engine cannot be used here.
        Interrupted: After Ctrl-C, when every worker has saved.
    """
    if workers is not None:
        check_number("sweep", "workers", workers, 1)
    folders = prepare("sweep", runs, folder)
    runs = list(runs)  # the values of a dictionary, for example
    jobs = []
    for run, run_folder, label in zip(runs, folders, labels(runs), strict=True):
        jobs.append(Job(replace(run, folder=None), run_folder, label))
        if again:
            jobs[-1].outcome = None
    engine = engine or Local()
    unfinished = [job.run for job in jobs if job.outcome is None]

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted("stopped at once; what was saved before is kept", code_of(number))

    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        stack.enter_context(handed_on(runs, "sweep"))
        stack.enter_context(signals_to(interrupt))
        is_cleared = False
        try:
            # An engine that is not needed is not opened: finished runs need no cluster.
            at_a_time = 1
            if unfinished:
                at_a_time = engine.open(unfinished, pathlib.Path(folder), workers)
            if again:
                clear_all(runs, folders)
                is_cleared = True
            train_all(jobs, engine, at_a_time, SweepScreen(jobs, enabled=progress))
        except KeyboardInterrupt as error:
            stopped = engine.stop()
            num_done = sum(job.state == State.DONE for job in jobs)
            command = "the same command"
            if is_cleared:
                command += " without --again"
            text = f"{stopped}; {num_done} of {len(jobs)} runs are done, {command} resumes"
            raise Interrupted(text, getattr(error, "code", INTERRUPTED)) from None
    return [job.outcome for job in jobs if job.outcome is not None]


def prepare(caller: str, runs: Sequence[Run], folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Return the folder of each run, `folder`/NAME-DIGEST.

    Raises:
        ValueError: For a run that occurs twice, and if a new run's folder cannot be written.
    """
    if isinstance(runs, Run) or not hasattr(runs, "__len__"):  # a generator could be read only once
        raise ValueError(f"{caller}: runs must be a list of runs, got {runs!r:.60}")
    folders: list[pathlib.Path] = []
    for run in runs:
        check_run(caller, run)
        run_folder = folder_in_sweep(run, folder)
        if run_folder in folders:
            raise ValueError(f"{caller}: the run {run.name!r} occurs twice; change a field or leave it out")
        folders.append(run_folder)
    # Finished runs may lie in a read-only folder.
    if not folders or not all(map(pathlib.Path.exists, folders)):
        check_folder(caller, pathlib.Path(folder))
    return folders


def clear_all(runs: Sequence[Run], folders: Sequence[pathlib.Path]) -> None:
    """Delete the training of all runs; errors are raised before anything is deleted.

    Raises:
        FolderInUse: If another process trains one of them.
        ValueError: For a run that could not begin anew.
    """
    from polyhead.train.checks import check, check_read_back, read_all  # they import PyTorch

    for run in runs:
        check_read_back(run)
        check(run)
        read_all(run)
    for folder in folders:
        if is_claimed(folder):
            raise FolderInUse(f"run folder: another process is training in {folder}")
    for run, folder in zip(runs, folders, strict=True):
        if folder.exists():
            with claim(run, folder):
                clear(folder)


# ------------------------------------------------------------------------------------------------------------ the queue
def train_all(jobs: Sequence[Job], engine: Engine, at_a_time: int, screen: SweepScreen) -> None:
    """Train the unfinished jobs, at most `at_a_time` of them in parallel, until each has an outcome."""
    waiting = deque(job for job in jobs if job.outcome is None)
    working: list[Job] = []
    while waiting or working:
        starting: list[Job] = []
        while waiting and len(working) + len(starting) < at_a_time:
            job = waiting.popleft()
            if job.prepare():
                starting.append(job)
                screen.tell(job, f"started ({job.folder})")
            else:
                screen.tell(job, job.ending())
        if starting:
            workers = engine.start([job.folder for job in starting])
            for job, worker in zip(starting, workers, strict=True):
                job.worker = worker
            working += starting
        for job in list(working):
            if job.poll():
                working.remove(job)
                screen.tell(job, job.ending())
        screen.update()
        time.sleep(engine.poll_seconds)
