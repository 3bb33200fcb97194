"""Progress of a sweep: a line when a run starts or ends, and at intervals a line for each run that trains.

Output never decides a sweep: whatever cannot be written is left out.
"""

import time
from collections import Counter
from collections.abc import Sequence

from polyhead.scale.sweep.job import Job, State
from polyhead.train.messages import print_notice
from polyhead.train.progress import QUIET_SECONDS, duration, wanted


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
    """The lines about a sweep on standard error."""

    def __init__(self, jobs: Sequence[Job], at_a_time: int, *, enabled: bool) -> None:
        self.jobs = jobs
        self.at_a_time = at_a_time
        self.enabled = wanted(enabled)
        self.last_lines = time.monotonic()
        for job in jobs:
            if job.outcome is not None:
                self.tell(job, "already done")

    def update(self) -> None:
        """Print the runs that train, if the last time is some time ago."""
        if self.enabled and time.monotonic() - self.last_lines > QUIET_SECONDS:
            self.last_lines = time.monotonic()
            for job in self.jobs:
                if job.state == State.RUNNING:
                    self.tell(job, job.progress())
            print_notice(f"all: {self.summary()}")

    def summary(self) -> str:
        """Return the number of runs by state, and the time left."""
        counts = Counter(job.state for job in self.jobs)
        parts = [f"{counts[state]} {state}" for state in State if counts[state]]
        seconds = seconds_left(self.jobs, self.at_a_time)
        if seconds:
            parts.append(f"{duration(seconds)} left")
        return ", ".join(parts)

    def tell(self, job: Job, text: str) -> None:
        """Print a line about a run."""
        if self.enabled:
            print_notice(f"{job.label}: {text}")
