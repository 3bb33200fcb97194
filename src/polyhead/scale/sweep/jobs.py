"""Many runs side by side: a list of runs and a worker for each, which an engine starts here or on a cluster.

A worker that dies takes nobody with it: it is started again, up to `retries` times, and goes on from its checkpoint.
A mistake in the input and a run that diverged would only happen again, so they are failures at once.  What is finished
is skipped, so the same call goes on with the rest; and a run that another process trains is left to that process, so
the same call on several machines that see the folder shares the work.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyhead import config as configs
from polyhead.config import Run
from polyhead.scale.sweep import screen as live
from polyhead.scale.sweep.engines.engine import LOG, LOST, MEMORY, Engine, Handle
from polyhead.scale.sweep.engines.local import Local
from polyhead.scale.sweep.screen import Screen
from polyhead.train.progress import duration
from polyhead.train.stop import DISK, INTERRUPTED, MISTAKE, PREEMPTED, Stop
from polyhead.train.store.disk import PASSING, Patience
from polyhead.train.store.files import named, unseal
from polyhead.train.store.folder import METRICS, Held, Result, claim, claimed_by, clear, finished

__all__ = ["LOG", "MEMORY", "Failure", "last_line", "prepare", "sweep"]

LOOK_SECONDS = 2.0
"""Between two looks at a run that somebody else trains."""
AGAIN = "started again"


@dataclass(frozen=True)
class Failure:
    """A run whose worker ended without a result: its exit code and the last line it said."""

    name: str
    folder: pathlib.Path
    code: int
    error: str


class Job:
    """One run of a sweep: who works on it, what its metrics.jsonl says so far, and how it ended."""

    def __init__(self, config: Run, folder: pathlib.Path) -> None:
        self.config, self.folder, self.digest = config, folder, configs.digest(config)
        self.handle: Handle | None = None
        self.holder: str | None = None  # the machine of another process that trains it
        self.outcome: Result | Failure | None = finished(folder, self.digest)
        self.deaths, self.retries, self.said = 0, 0, ""
        self.step, self.rate, self.read = 0, 0.0, 0
        self.begun, self.before = False, -1  # whether its worker trains; when metrics.jsonl was changed before that
        self.shown: dict[str, str] = {}
        self._follow()

    @property
    def state(self) -> str:
        if self.outcome is not None:
            return live.DONE if isinstance(self.outcome, Result) else live.FAILED
        if self.holder is not None:
            return live.ELSEWHERE
        if self.handle is not None and self.begun:
            return live.RUNNING
        return live.RETRYING if self.deaths else live.WAITING

    def ready(self) -> bool:
        """Write the configuration into the folder, which is ours to train in; False where there is nothing to do."""
        self.folder.parent.stat()  # a share that is gone is waited for
        self.holder, self.outcome = None, finished(self.folder, self.digest)
        if self.outcome is not None:
            return False
        self.begun, self.before = False, self._changed()
        try:
            with claim(self.config, self.folder), named(self.folder / LOG):
                open(self.folder / LOG, "ab").close()
        except Held:
            self.holder = claimed_by(self.folder) or ""
        except ValueError as error:
            self.outcome = Failure(self.config.name, self.folder, MISTAKE, str(error))
        except OSError as error:  # of this run's folder alone
            if error.errno in PASSING:
                raise
            self.outcome = Failure(self.config.name, self.folder, DISK, error.strerror or str(error))
        return self.outcome is None and self.holder is None

    def poll(self) -> bool:
        """Read new rows; True when the worker has just ended: then there is an outcome, a holder, or it shall go on."""
        self._follow()
        if self.handle is None:
            return False
        self.begun = self.begun or self._changed() != self.before
        code = self.handle.code()
        if code is None:
            return False
        self._follow()
        self.handle, self.outcome = None, finished(self.folder, self.digest)
        if self.outcome is None:
            self._ended(code)
        return True

    def _ended(self, code: int) -> None:
        self.said = said = last_line(self.folder / LOG, code)
        if code == MISTAKE and ((holder := claimed_by(self.folder)) is not None or is_held(said)):
            self.holder = holder or ""  # somebody was quicker
        elif code in (MISTAKE, INTERRUPTED) or (code != PREEMPTED and self.deaths >= self.retries):
            times = f" ({self.deaths + 1} times)" if self.deaths else ""
            self.outcome = Failure(self.config.name, self.folder, code, said + times)
            if code not in (MISTAKE, INTERRUPTED):  # who dies may say nothing
                self._note(said + times)
        elif code != PREEMPTED:
            self.deaths += 1
            self._note(f"{AGAIN} ({self.deaths} of {self.retries}): {said}")

    def _note(self, text: str) -> None:
        """For those who look at the folder, see status.py."""
        with contextlib.suppress(OSError), open(self.folder / LOG, "a") as log:
            log.write(f"polyhead: {text}\n")

    def look(self) -> bool:
        """Whether the other process has let go of it, with or without a result."""
        self._follow()
        self.outcome = finished(self.folder, self.digest)
        holder = claimed_by(self.folder) if self.outcome is None else None
        self.holder = holder
        return holder is None

    def _changed(self) -> int:
        try:
            return (self.folder / METRICS).stat().st_mtime_ns
        except OSError:
            return -1

    def _follow(self) -> None:
        try:
            with open(self.folder / METRICS, "rb") as file:
                if file.seek(0, os.SEEK_END) < self.read:
                    self.read = 0  # a resumed run has cut the file
                file.seek(self.read)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
                self._show(unseal(json.loads(line), METRICS))

    def _show(self, row: dict[str, Any]) -> None:
        metric, self.step = self.config.task.metric, int(row["step"])
        if row["kind"] == "train":
            self.rate = rate if math.isfinite(rate := float(row["steps_per_second"])) else 0.0
            self.shown["loss"] = f"{row['loss']:.4f}"
        elif row["kind"] == "eval":
            self.shown[f"{row['split']} {metric}"] = f"{row[metric]:.3f}"

    def text(self) -> str:
        shown = "  ".join(f"{name} {value}" for name, value in self.shown.items())
        if isinstance(self.outcome, Failure):
            return f"failed: {self.outcome.error}"
        if self.outcome is not None:
            return f"{shown}  done in {duration(self.outcome.seconds)}".strip()
        if self.holder is not None:
            return f"{shown}  trained by another process{f' on {self.holder}' if self.holder else ''}".strip()
        retry = f"  retry {self.deaths} of {self.retries}" if self.deaths else ""
        if not self.begun:
            return retry.strip()
        left = (self.config.train.steps - self.step) / self.rate if self.rate else 0.0
        return (f"{shown}  {self.rate:.1f} steps/s  {duration(left)} left" if self.rate else "starting") + retry


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


def last_line(path: pathlib.Path, code: int) -> str:
    """The last thing a worker's log says, or how the worker ended."""
    if code == LOST:
        return "lost: its machine, or its job, is gone"
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    said = lines[-1].removeprefix("polyhead: ") if lines else ""
    return said if code > 0 and said else f"killed by signal {-code}" if code < 0 else f"no result (exit code {code})"


def is_held(said: str) -> bool:
    """Whether a worker ended because another process trains in its folder."""
    return said.startswith("run folder: another process is training in ")
