"""Progress of a sweep: a live table on a terminal, else a line at events and at intervals.

Output never decides a sweep: whatever cannot be written is left out.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from polyhead.scale.sweep.job import Job
from polyhead.train.messages import print_notice
from polyhead.train.progress import QUIET_SECONDS, duration, wanted
from polyhead.train.store.state import State

MAX_ROWS = 20
"""With more runs, a terminal shows only the active ones."""


def seconds_left(jobs: Sequence[Job], at_a_time: int) -> float | None:
    """Return the estimated seconds until all runs are done; None if the speed of no run is known.

    The longest run, or all steps that are left divided by the number of workers, whichever is more.
    """
    known = [speed for speed in map(Job.seconds_per_step, jobs) if speed is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    seconds = [0.0]
    for job in jobs:
        if job.outcome is None:
            seconds.append((job.run.train.steps - job.step) * (job.seconds_per_step() or mean))
    return max(*seconds, sum(seconds) / at_a_time)


class SweepScreen:
    """A progress bar per run, and one for all runs."""

    def __init__(self, jobs: Sequence[Job], at_a_time: int, *, enabled: bool) -> None:
        self.jobs = jobs
        self.at_a_time = at_a_time
        self.enabled = wanted(enabled)
        console = Console(stderr=True)
        self.live = self.enabled and console.is_terminal
        self.bars = Progress(
            TextColumn("{task.description}"),
            TextColumn("{task.fields[state]}"),
            BarColumn(24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not self.live,
        )
        self.ids: list[TaskID] = []
        self.last_lines = time.monotonic()

    def __enter__(self) -> "SweepScreen":
        with contextlib.suppress(OSError):
            self.bars.start()
        for job in self.jobs:
            self.ids.append(self.bars.add_task(job.label, total=job.run.train.steps, state="", text=""))
            if job.state == State.DONE:
                self.tell(job, "already done")
        total = sum(job.run.train.steps for job in self.jobs)
        self.ids.append(self.bars.add_task("all", total=total, state="", text=""))
        self.update()
        return self

    def __exit__(self, *error: object) -> None:
        self.update()
        with contextlib.suppress(OSError):
            self.bars.stop()

    def update(self) -> None:
        """Draw the bars, or print the active runs from time to time."""
        if self.live:
            with contextlib.suppress(OSError):
                self.draw()
        elif self.enabled and time.monotonic() - self.last_lines > QUIET_SECONDS:
            self.last_lines = time.monotonic()
            for job in self.jobs:
                if job.state == State.RUNNING:
                    self.tell(job, f"step {job.step}/{job.run.train.steps}  {job.text()}")
            print_notice(f"all: {self.summary()}")

    def draw(self) -> None:
        for job, bar in zip(self.jobs, self.ids, strict=False):
            is_visible = len(self.jobs) <= MAX_ROWS or job.state not in (State.DONE, State.WAITING)
            self.bars.update(bar, completed=job.step, state=job.state, text=job.text(), visible=is_visible)
        self.bars.update(self.ids[-1], completed=sum(job.step for job in self.jobs), text=self.summary())

    def summary(self) -> str:
        """Return the number of runs by state, and the time left."""
        counts = Counter(job.state for job in self.jobs)
        parts = [f"{counts[state]} {state}" for state in State if counts[state]]
        seconds = seconds_left(self.jobs, self.at_a_time)
        if seconds:
            parts.append(f"{duration(seconds)} left")
        return ", ".join(parts)

    def tell(self, job: Job, text: str) -> None:
        """Print an event of a run as one line, where no bar shows it."""
        if self.enabled and not self.live:
            print_notice(f"{job.label}: {text}")
