"""Progress of a sweep: a live table on a terminal, else a line at events and at intervals.

Output never decides a sweep: whatever cannot be written is left out.
"""

import contextlib
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from polyhead.scale.sweep.job import Job
from polyhead.train.messages import print_notice
from polyhead.train.progress import QUIET_SECONDS, duration, wanted
from polyhead.train.store.state import State

MAX_ROWS = 20
"""With more runs, a terminal shows only the active ones."""
ORDER = (State.DONE, State.RUNNING, State.RETRYING, State.ELSEWHERE, State.WAITING, State.FAILED)


# ----------------------------------------------------------------------------------------------------------------- time
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


# ---------------------------------------------------------------------------------------------------------- the display
class SweepScreen:
    """A progress bar per run, and one for all runs."""

    def __init__(self, jobs: Sequence[Job], at_a_time: int, *, enabled: bool) -> None:
        self.jobs = jobs
        self.at_a_time = at_a_time
        self.enabled = wanted(enabled)
        self.console = Console(stderr=True)
        self.live = self.enabled and self.console.is_terminal
        self.bars = Progress(
            TextColumn("{task.description}"),
            TextColumn("{task.fields[state]}"),
            BarColumn(24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            disable=not self.live,
        )
        self.ids: list[TaskID] = []
        self.last_lines = time.monotonic()

    def __enter__(self) -> "SweepScreen":
        total = sum(job.run.train.steps for job in self.jobs)
        with contextlib.suppress(OSError):
            self.bars.start()
        for job in self.jobs:
            self.ids.append(self.bars.add_task(job.label, total=job.run.train.steps, state="", text=""))
            if job.state == State.DONE:
                self.line(f"{job.label}: already done")
        self.ids.append(self.bars.add_task("all", total=total, state="", text=""))
        self.update()
        return self

    def __exit__(self, *error: object) -> None:
        self.update()
        with contextlib.suppress(OSError):
            self.bars.stop()

    def update(self) -> None:
        if self.live:
            with contextlib.suppress(OSError):
                self.draw()
        elif time.monotonic() - self.last_lines > QUIET_SECONDS:
            self.last_lines = time.monotonic()
            for job in self.jobs:
                if job.state == State.RUNNING:
                    self.line(f"{job.label}: step {job.step}/{job.run.train.steps}  {self.job_text(job)}")
            self.line(f"all: {self.summary()}")

    def draw(self) -> None:
        """Update the bars."""
        for job, bar in zip(self.jobs, self.ids, strict=False):
            is_visible = len(self.jobs) <= MAX_ROWS or job.state not in (State.DONE, State.WAITING)
            self.bars.update(bar, completed=job.step, state=job.state, text=job.text(), visible=is_visible)
        self.bars.update(self.ids[-1], completed=sum(job.step for job in self.jobs), text=self.summary())

    def job_text(self, job: Job) -> str:
        """Return the state of a run as text."""
        return job.text()

    def summary(self) -> str:
        """Return the number of runs by state, and the time left."""
        states = [job.state for job in self.jobs]
        parts = []
        for state in ORDER:
            if state in states:
                parts.append(f"{states.count(state)} {state}")
        seconds = seconds_left(self.jobs, self.at_a_time)
        if seconds:
            parts.append(f"{duration(seconds)} left")
        return ", ".join(parts)

    def tell(self, job: Job, text: str) -> None:
        """Print an event of a run as one line."""
        self.line(f"{job.label}: {text}")

    def line(self, text: str) -> None:
        if self.enabled and not self.live:
            print_notice(text)
