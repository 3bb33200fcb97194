"""Progress of a sweep: a live table on a terminal, else a line at events and at intervals."""

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from polyhead.scale.sweep.job import Job
from polyhead.train.messages import print_notice
from polyhead.train.progress import QUIET_SECONDS, duration, wanted
from polyhead.train.store.state import State

ROWS = 20
"""With more runs, a terminal shows only the active ones."""


def left(jobs: Sequence[Job], at_once: int) -> float | None:
    """The estimated seconds until all runs are done, from the known paces; None if no pace is known.

    Workers are assumed to start as fast as before.  A waiting run starts when a running one ends.
    """
    known = [pace for job in jobs if (pace := job.pace) is not None]
    if not known:
        return None
    mean, starts = sum(known) / len(known), [job.overhead for job in jobs if job.overhead is not None]
    start = sum(starts) / len(starts) if starts else 0.0

    def seconds(job: Job) -> float:
        rest = (job.config.train.steps - job.step) * (job.pace or mean)
        return rest + (0.0 if job.training or job.state == State.ELSEWHERE else start)

    mine = [job for job in jobs if job.outcome is None and job.state != State.ELSEWHERE]
    free = [0.0] * max(1, min(at_once, len(mine)))
    for job in sorted(mine, key=lambda job: not job.training):
        free[free.index(min(free))] += seconds(job)
    return max(*free, *(seconds(job) for job in jobs if job.state == State.ELSEWHERE), 0.0)


class SweepScreen:
    """A progress bar per run, and one for all runs."""

    def __init__(self, jobs: Sequence[Job], at_once: int, *, enabled: bool) -> None:
        self.jobs, self.at_once, self.enabled, self.console = jobs, at_once, wanted(enabled), Console(stderr=True)
        self.live = self.enabled and self.console.is_terminal
        self.bars = Progress(
            TextColumn("{task.description}"), TextColumn("{task.fields[state]}"), BarColumn(24),
            TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[text]}"),
            console=self.console, disable=not self.live,
        )  # fmt: skip
        self.ids: list[TaskID] = []
        self.spoken = time.monotonic()

    def __enter__(self) -> "SweepScreen":
        self.bars.start()
        for job in self.jobs:
            self.ids.append(self.bars.add_task(job.label, total=job.config.train.steps, state="", text=""))
            if job.state == State.DONE:
                self.line(f"{job.label}: already done")
        total = sum(job.config.train.steps for job in self.jobs)
        self.ids.append(self.bars.add_task("all", total=total, state="", text=""))
        self.update()
        return self

    def __exit__(self, *raised: object) -> None:
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
                    self.line(f"{job.label}: step {job.step}/{job.config.train.steps}  {self.told(job)}")
            self.line(f"all: {self.summary()}")

    def told(self, job: Job) -> str:
        """The state of a run as text."""
        return job.text()

    def summary(self) -> str:
        """The number of runs by state, and the time left."""
        counted = Counter(job.state for job in self.jobs)
        order = (State.DONE, State.RUNNING, State.RETRYING, State.ELSEWHERE, State.WAITING, State.FAILED)
        told = [f"{counted[state]} {state}" for state in order if counted[state]]
        if len(self.jobs) > counted[State.DONE] + counted[State.FAILED]:
            seconds = left(self.jobs, self.at_once)
            told += [] if seconds is None else [f"{duration(seconds)} left"]
        return ", ".join(told)

    def tell(self, job: Job, text: str) -> None:
        """Print the last event of a run as one line."""
        self.line(f"{job.label}: {text}")

    def line(self, text: str) -> None:
        if self.enabled and not self.live:
            print_notice(text)
