"""Many runs in parallel: an engine starts a worker for each, on this machine or on a cluster.

A worker that dies is started again up to `retries` times, and resumes from its checkpoint.  Invalid input and
divergence would happen again, so they fail at once.  Finished runs are skipped, so the same call resumes a sweep.  A
run that another process trains is left to that process, so the same call on several machines with a shared folder
divides the work.
"""

import contextlib
import pathlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from polyhead.config import Run, check_run
from polyhead.config.extensions import handed_on
from polyhead.scale.sweep.engines import Engine
from polyhead.scale.sweep.engines.local import Local
from polyhead.scale.sweep.job import Failure, Job
from polyhead.scale.sweep.naming import labels
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.scale.sweep.status import place_of
from polyhead.spec.shapes import check_number
from polyhead.train.stop import StopSignals
from polyhead.train.store.claims import claim
from polyhead.train.store.files import check_folder
from polyhead.train.store.folder import Result, clear
from polyhead.train.store.state import State

HOLDER_SECONDS = 2.0
"""Seconds between two polls of runs that other processes train."""


# ------------------------------------------------------------------------------------------------------------- the call
def sweep(
    runs: Sequence[Run],
    folder: str | pathlib.Path,
    *,
    workers: int | None = None,
    threads: int | None = None,
    progress: bool = True,
    again: bool = False,
    retries: int = 2,
    engine: Engine | None = None,
    screen: Callable[..., SweepScreen] = SweepScreen,
) -> list[Result | Failure]:
    """Train every run in `folder`/NAME-DIGEST; return results or failures in the order of `runs`.

    `workers`: how many train in parallel, each with `threads` threads; by default the engine decides.
    `engine`: `Local` by default.  `again`: delete earlier training and start over.  `screen`: shows progress.
    Raises ValueError if the engine cannot be used here.  Raises Interrupted after Ctrl-C, when every worker has saved.
    """
    if workers is not None:
        check_number("sweep", "workers", workers, 1)
    if threads is not None:
        check_number("sweep", "threads", threads, 1)
    check_number("sweep", "retries", retries, 0)
    folders = prepare("sweep", runs, folder, again=again)
    jobs = []
    for run, run_folder, label in zip(runs, folders, labels(runs), strict=True):
        jobs.append(Job(replace(run, folder=None), run_folder, label, retries))
    engine = engine or Local()
    # An engine that is not needed is not opened: finished runs need no cluster.
    unfinished = [job.run for job in jobs if job.outcome is None]
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        stack.enter_context(handed_on(runs, "sweep"))
        stop = stack.enter_context(interruptible())
        try:
            at_a_time = 1
            if unfinished:
                at_a_time = engine.open(unfinished, pathlib.Path(folder), workers, threads)
            display = stack.enter_context(screen(jobs, at_a_time, enabled=progress))
            train_all(jobs, engine, at_a_time, display)
        except KeyboardInterrupt:
            stopped = engine.stop()
            num_done = [job.state for job in jobs].count(State.DONE)
            text = f"{stopped}; {num_done} of {len(jobs)} runs are done, the same command resumes"
            raise stop.interrupted(text) from None
    return [job.outcome for job in jobs if job.outcome is not None]


def prepare(caller: str, runs: Sequence[Run], folder: str | pathlib.Path, *, again: bool) -> list[pathlib.Path]:
    """Return the folder of each run, `folder`/NAME-DIGEST; with `again`, delete all training there.

    Raises ValueError for a run that occurs twice, and if a new run's folder cannot be written.
    """
    if isinstance(runs, Run) or not hasattr(runs, "__len__"):  # a generator could be read only once
        raise ValueError(f"{caller}: runs must be a list of runs, got {runs!r:.60}")
    folders: list[pathlib.Path] = []
    for run in runs:
        check_run(caller, run)
        run_folder = place_of(run, folder)
        if run_folder in folders:
            raise ValueError(f"{caller}: the run {run.name!r} occurs twice; change a field or leave it out")
        folders.append(run_folder)
    for run, run_folder in zip(runs, folders, strict=True):
        if again and run_folder.exists():
            with claim(run, run_folder):
                clear(run_folder)
    # Finished runs may lie in a read-only folder.
    if not folders or not all(map(pathlib.Path.exists, folders)):
        check_folder(caller, pathlib.Path(folder))
    return folders


# ------------------------------------------------------------------------------------------------------------ the queue
def train_all(jobs: Sequence[Job], engine: Engine, at_a_time: int, screen: SweepScreen) -> None:
    """Train the unfinished jobs, at most `at_a_time` of them in parallel, until each has an outcome."""
    waiting = deque(job for job in jobs if job.outcome is None)
    working: list[Job] = []
    elsewhere: list[Job] = []
    last_poll_of_holders = 0.0
    while waiting or working or elsewhere:
        # Start workers.  Where other sweeps train here, too, take runs from the end, which they reach last.
        starting: list[Job] = []
        while waiting and len(working) + len(starting) < at_a_time:
            if elsewhere:
                job = waiting.pop()
            else:
                job = waiting.popleft()
            if job.prepare():
                starting.append(job)
                screen.tell(job, f"started ({job.folder})")
            else:
                if job.is_held:
                    elsewhere.append(job)
                screen.tell(job, job.text())
        if starting:
            workers = engine.start([job.folder for job in starting])
            for job, worker in zip(starting, workers, strict=True):
                job.start(worker)
            working += starting

        # Collect workers that have ended.  A run that starts again goes to the end of the queue.
        for job in list(working):
            if not job.poll():
                continue
            working.remove(job)
            if job.outcome is not None:
                screen.tell(job, job.text())
            elif job.is_held:
                elsewhere.append(job)
                screen.tell(job, job.text())
            else:
                waiting.append(job)
                screen.tell(job, f"{job.last_words}; will be started again")

        # Take over runs that other processes have left without a result.
        if time.monotonic() - last_poll_of_holders > HOLDER_SECONDS:
            last_poll_of_holders = time.monotonic()
            for job in list(elsewhere):
                if job.poll_holder():
                    elsewhere.remove(job)
                    if job.outcome is None:
                        waiting.append(job)
                    screen.tell(job, job.text() or "left by the other process")
        screen.update()
        time.sleep(engine.poll_seconds)


# -------------------------------------------------------------------------------------------------------------- signals
@contextlib.contextmanager
def interruptible() -> Iterator[StopSignals]:
    """Let SIGTERM, SIGHUP and SIGUSR1 act like Ctrl-C, so that no worker keeps running.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    stop = StopSignals()
    stop.asked = signal.SIGINT

    def interrupt(number: int, frame: object) -> None:
        stop.asked = signal.SIGINT
        if number in StopSignals.signals:
            stop.asked = number
        raise KeyboardInterrupt

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
            number = getattr(signal, name, None)  # Windows has fewer
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, interrupt)
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
