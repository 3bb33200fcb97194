"""Many runs in parallel: an engine starts a worker for each, on this machine or on a cluster.

A worker that dies is restarted up to `retries` times, and resumes from its checkpoint.  Invalid input and divergence
would happen again, so they fail at once.  Finished runs are skipped, so the same call resumes a sweep.  A run that
another process trains is left to that process, so the same call on several machines with a shared folder divides the
work.
"""

import contextlib
import functools
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
from polyhead.train.store.disk import DiskRetry
from polyhead.train.store.files import check_folder
from polyhead.train.store.folder import Result, clear

LOOK_SECONDS = 2.0
"""Seconds between two polls of a run that another process trains."""


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
    """Train every run in `folder`/NAME-DIGEST; results or failures in the order of `runs`.

    `workers`: parallel workers, each with `threads` threads (default: chosen by the engine, which is `Local` by
    default).  `again`: delete earlier training and start over.  A worker that dies is restarted up to `retries` times.
    `screen`: shows progress.  Raises Interrupted after Ctrl-C, when every worker has saved, and ValueError for an
    engine that cannot be used here.
    """
    for name, value, least in (("workers", workers, 1), ("threads", threads, 1), ("retries", retries, 0)):
        if value is not None:
            check_number("sweep", name, value, least)
    places = prepare("sweep", runs, folder, again=again)
    named = zip(runs, places, labels(runs), strict=True)
    jobs = [Job(replace(run, folder=None), place, label, retries) for run, place, label in named]
    engine = Local() if engine is None else engine
    open_ = [job.config for job in jobs if job.outcome is None]
    with contextlib.ExitStack() as held:
        held.callback(engine.close)
        held.enter_context(handed_on(runs, "sweep"))
        at_once = engine.open(open_, pathlib.Path(folder), workers, threads) if open_ else 1
        shown = held.enter_context(screen(jobs, at_once, enabled=progress))
        stop = held.enter_context(interruptible())
        try:
            _UnfinishedRuns(jobs, engine, at_once, shown).do()
        except KeyboardInterrupt:
            done = sum(isinstance(job.outcome, Result) for job in jobs)
            became = engine.stop([job.handle for job in jobs if job.handle is not None])
            text = f"{became}; {done} of {len(jobs)} runs are done, the same command resumes"
            raise stop.interrupted(text) from None
    return [job.outcome for job in jobs if job.outcome is not None]


def prepare(who: str, runs: Sequence[Run], folder: str | pathlib.Path, *, again: bool) -> list[pathlib.Path]:
    """The folder of each run, `folder`/NAME-DIGEST; with `again`, all training there is deleted.

    Raises ValueError for a run that occurs twice, and if a new run's folder cannot be written.
    """
    if isinstance(runs, Run) or not hasattr(runs, "__len__"):  # a generator could be read only once
        raise ValueError(f"{who}: a list of runs was wanted but {runs!r:.60} came")
    for run in runs:
        check_run(who, run)
    places = [place_of(run, folder) for run in runs]
    if len(set(places)) < len(places):
        twice = next(run.name for run, place in zip(runs, places, strict=True) if places.count(place) > 1)
        raise ValueError(f"{who}: the run {twice!r} occurs twice")
    for run, place in zip(runs, places, strict=True):
        if again and place.exists():
            with claim(run, place):
                clear(place)
    if not (places and all(place.exists() for place in places)):  # finished runs may lie in a read-only folder
        check_folder(who, pathlib.Path(folder))
    return places


class _UnfinishedRuns:
    """The unfinished runs of a sweep: waiting, trained by our workers, trained by other processes."""

    def __init__(self, jobs: Sequence[Job], engine: Engine, at_once: int, screen: SweepScreen) -> None:
        self.waiting = deque(job for job in jobs if job.outcome is None)
        self.working: list[Job] = []
        self.others: list[Job] = []
        self.engine, self.at_once, self.screen, self.retry = engine, at_once, screen, DiskRetry(StopSignals())
        self.met = False  # whether another sweep works here: then we take waiting runs from the end
        self.looked = 0.0

    def do(self) -> None:
        """Work until no run is unfinished."""
        room = len(self.waiting) if self.engine.queues else self.at_once
        while self.waiting or self.working or self.others:
            self._start(room)
            self._collect()
            self._look()
            room = self.at_once - len(self.working)
            self.screen.update()
            time.sleep(self.engine.pause)

    def _start(self, room: int) -> None:
        """Start up to `room` waiting runs."""
        ready: list[Job] = []
        while self.waiting and len(ready) < room:
            job = self.waiting.pop() if self.met else self.waiting.popleft()
            if self.retry(job.ready):
                ready.append(job)
                self.screen.tell(job, f"started ({job.folder})")
                continue
            if job.outcome is None:
                self.others.append(job)
                self.met = True
            self.screen.tell(job, job.text())
        if ready:
            start = functools.partial(self.engine.start, [job.folder for job in ready])
            for job, handle in zip(ready, self.retry(start), strict=True):
                job.handle, job.training = handle, not self.engine.queues
            self.working += ready

    def _collect(self) -> None:
        """Collect the runs whose workers have ended; a run to restart goes to the end of the queue."""
        for job in [job for job in self.working if job.poll()]:
            self.working.remove(job)
            if job.outcome is not None:
                self.screen.tell(job, job.text())
            elif job.holder is not None:
                self.met = True
                self.others.append(job)
                self.screen.tell(job, job.text())
            else:
                self.waiting.append(job)
                self.screen.tell(job, f"{job.said}; will be started again")

    def _look(self) -> None:
        """Collect the runs that other processes no longer train."""
        if not self.others or time.monotonic() - self.looked <= LOOK_SECONDS:
            return
        self.looked = time.monotonic()
        for job in [job for job in self.others if job.look()]:
            self.others.remove(job)
            if job.outcome is None:
                self.waiting.append(job)
            self.screen.tell(job, job.text() if job.outcome else "let go by the other process")


@contextlib.contextmanager
def interruptible() -> Iterator[StopSignals]:
    """SIGTERM, and SIGHUP and SIGUSR1 where they exist, act like Ctrl-C, so that no worker keeps running."""
    found = StopSignals()
    found.asked = signal.SIGINT

    def stop(number: int, frame: object) -> None:
        found.asked = number if number in StopSignals.signals else signal.SIGINT
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
