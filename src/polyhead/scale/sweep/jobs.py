"""Many runs side by side: a list of runs and a worker for each, which an engine starts here or on a cluster.

A worker that dies takes nobody with it: it is started again, up to `retries` times, and goes on from its checkpoint.
A mistake in the input and a run that diverged would only happen again, so they are failures at once.  What is finished
is skipped, so the same call goes on with the rest; and a run that another process trains is left to that process, so
the same call on several machines that see the folder shares the work.
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

from polyhead import config as configs
from polyhead.config import Run
from polyhead.config.extensions import handed_on
from polyhead.scale.sweep.engines import LOG, MEMORY, Engine
from polyhead.scale.sweep.engines.local import Local
from polyhead.scale.sweep.job import AGAIN, Failure, Job
from polyhead.scale.sweep.screen import Screen
from polyhead.train.stop import Stop
from polyhead.train.store.claims import claim
from polyhead.train.store.disk import Patience
from polyhead.train.store.folder import Result, clear

__all__ = ["LOG", "MEMORY", "Failure", "prepare", "sweep"]

LOOK_SECONDS = 2.0
"""Between two looks at a run that somebody else trains."""


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
    screen: Callable[..., Screen] = Screen,
) -> list[Result | Failure]:
    """Train every run in `folder`/NAME-DIGEST; results or failures in the order of `runs`.

    `workers` run at once, each with `threads` threads (default: what the engine, without one `Local`, finds right).
    `again`: forget what is there and start over.  A worker that dies is started again up to `retries` times.  `screen`
    makes what a person sees meanwhile.  Raises Interrupted after Ctrl-C, when every worker has saved, and ValueError
    for an engine that cannot be used here.
    """
    for name, value, least in (("workers", workers, 1), ("threads", threads, 1), ("retries", retries, 0)):
        if value is not None and value < least:
            raise ValueError(f"sweep: {name} must be at least {least} but is {value}")
    places = prepare("sweep", runs, folder, again=again)
    jobs = [Job(replace(run, folder=None), place) for run, place in zip(runs, places, strict=True)]
    for job in jobs:
        job.retries = retries
    engine = Local() if engine is None else engine
    open_ = [job.config for job in jobs if job.outcome is None]
    with contextlib.ExitStack() as held:
        held.callback(engine.close)
        held.enter_context(handed_on(runs, "sweep"))
        at_once = engine.open(open_, pathlib.Path(folder), workers, threads) if open_ else 1
        shown = held.enter_context(screen(jobs, at_once, enabled=progress))
        stop = held.enter_context(interruptible())
        try:
            _work(jobs, engine, at_once, shown)
        except KeyboardInterrupt:
            done = sum(isinstance(job.outcome, Result) for job in jobs)
            became = engine.stop([job.handle for job in jobs if job.handle is not None])
            text = f"{became}; {done} of {len(jobs)} runs are done, the same command goes on"
            raise stop.interrupted(text) from None
    return [job.outcome for job in jobs if job.outcome is not None]


def prepare(who: str, runs: Sequence[Run], folder: str | pathlib.Path, *, again: bool) -> list[pathlib.Path]:
    """The folder of each run, `folder`/NAME-DIGEST; with `again`, all training there is forgotten.

    Raises ValueError for a run that occurs twice and where no folder can be made.
    """
    places = [pathlib.Path(folder) / f"{run.name}-{configs.digest(run)}" for run in runs]
    if len(set(places)) < len(places):
        twice = next(run.name for run, place in zip(runs, places, strict=True) if places.count(place) > 1)
        raise ValueError(f"{who}: the run {twice!r} occurs twice")
    for run, place in zip(runs, places, strict=True):
        if again and place.exists():
            with claim(run, place):
                clear(place)
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{who}: {folder} cannot be made ({error.strerror})") from None
    return places


def _work(jobs: Sequence[Job], engine: Engine, at_once: int, screen: Screen) -> None:
    """Hand over what is waiting, in its order; a run that died goes to the end of it, and so do those of others."""
    waiting = deque(job for job in jobs if job.outcome is None)
    working: list[Job] = []
    others: list[Job] = []
    room, met, looked = len(waiting) if engine.queues else at_once, False, 0.0
    patiently = Patience(Stop())
    while waiting or working or others:
        ready: list[Job] = []
        while waiting and len(ready) < room:
            job = waiting.pop() if met else waiting.popleft()  # two sweeps go from both ends and meet once
            if patiently(job.ready):
                ready.append(job)
            elif job.outcome is None:
                others.append(job)
                met = True
            screen.tell(job, f"started ({job.folder})" if job in ready else job.text())
        if ready:
            folders = [job.folder for job in ready]
            for job, handle in zip(ready, patiently(functools.partial(engine.start, folders)), strict=True):
                job.handle, job.begun = handle, not engine.queues
            working += ready
        for job in [job for job in working if job.poll()]:
            working.remove(job)
            met = met or job.holder is not None
            screen.tell(job, job.text() if job.outcome or job.holder is not None else f"{job.said}; is {AGAIN}")
            if job.outcome is None:
                (waiting if job.holder is None else others).append(job)
        if others and time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            for job in [job for job in others if job.look()]:
                others.remove(job)
                waiting += [job] if job.outcome is None else []
                screen.tell(job, job.text() if job.outcome else "let go by the other process")
        room = at_once - len(working)
        screen.update()
        time.sleep(engine.pause)


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """SIGTERM, and SIGHUP and SIGUSR1 where they exist, act like Ctrl-C, so that no worker is left behind."""
    found = Stop()
    found.asked = signal.SIGINT

    def stop(number: int, frame: object) -> None:
        found.asked = number if number in Stop.signals else signal.SIGINT
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
