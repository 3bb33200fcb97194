"""What a person sees of a sweep: a live table on a terminal, else a line when something happens and now and then."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from polyhead.scale.sweep.job import Job
from polyhead.train.progress import QUIET_SECONDS, duration
from polyhead.train.store.folder import Result
from polyhead.train.store.state import State

ROWS = 20
"""Of more runs than these a terminal shows only those that something happens to."""


def left(jobs: Sequence[Job], at_once: int) -> float | None:
    """Seconds until all runs are done, by the speed of those that have one; None while none has.

    At least the longest run that is left, and all of ours over those that work at a time.
    """
    known = [1 / job.rate for job in jobs if job.rate]
    known += [job.outcome.seconds / max(1, job.outcome.steps) for job in jobs if isinstance(job.outcome, Result)]
    if not known:
        return None
    mean = sum(known) / len(known)
    seconds = {job: (job.config.train.steps - job.step) * (1 / job.rate if job.rate else mean) for job in jobs}
    mine = [seconds[job] for job in jobs if job.outcome is None and job.state != State.ELSEWHERE]
    theirs = [seconds[job] for job in jobs if job.state == State.ELSEWHERE]
    return max(0.0, sum(mine) / max(1, min(at_once, len(mine))), *mine, *theirs)


class Screen:
    """A bar per run, and one for all of them."""

    def __init__(self, jobs: Sequence[Job], at_once: int, *, enabled: bool) -> None:
        self.jobs, self.at_once, self.enabled, self.console = jobs, at_once, enabled, Console(stderr=True)
        self.live = enabled and self.console.is_terminal
        head, tail = (
            ("{task.description}", "{task.fields[state]}"),
            ("{task.completed}/{task.total}", "{task.fields[text]}"),
        )
        columns = (*map(TextColumn, head), BarColumn(24), *map(TextColumn, tail))
        self.bars = Progress(*columns, console=self.console, disable=not self.live)
        self.ids: list[TaskID] = []
        self.spoken = time.monotonic()

    def __enter__(self) -> "Screen":
        self.bars.start()
        for job in self.jobs:
            self.ids.append(self.bars.add_task(job.config.name, total=job.config.train.steps, state="", text=""))
            if job.state == State.DONE:
                self.line(f"{job.config.name}: already done")
        total = sum(job.config.train.steps for job in self.jobs)
        self.ids.append(self.bars.add_task("all", total=total, state="", text=""))
        self.update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()
        self.bars.stop()

    def update(self) -> None:
        if self.live:
            few = len(self.jobs) <= ROWS
            for job, bar in zip(self.jobs, self.ids, strict=False):
                shown = few or job.state not in (State.DONE, State.WAITING)
                self.bars.update(bar, completed=job.step, state=job.state, text=job.text(), visible=shown)
            self.bars.update(self.ids[-1], completed=sum(job.step for job in self.jobs), text=self.summary())
        elif time.monotonic() - self.spoken > QUIET_SECONDS:
            self.spoken = time.monotonic()
            for job in self.jobs:
                if job.state == State.RUNNING:
                    self.line(f"{job.config.name}: step {job.step}/{job.config.train.steps}  {job.text()}")
            self.line(f"all: {self.summary()}")

    def summary(self) -> str:
        """How many runs are what, and how long it takes."""
        counted = Counter(job.state for job in self.jobs)
        order = (State.DONE, State.RUNNING, State.RETRYING, State.ELSEWHERE, State.WAITING, State.FAILED)
        seconds = (
            left(self.jobs, self.at_once) if len(self.jobs) > counted[State.DONE] + counted[State.FAILED] else None
        )
        told = [f"{counted[state]} {state}" for state in order if counted[state]]
        return ", ".join(told + ([f"{duration(seconds)} left"] if seconds is not None else []))

    def tell(self, job: Job, text: str) -> None:
        """What has just happened to a run."""
        self.line(f"{job.config.name}: {text}")

    def line(self, text: str) -> None:
        if self.enabled and not self.live:
            print(text, file=sys.stderr, flush=True)
