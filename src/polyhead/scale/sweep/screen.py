"""Progress of a sweep: a line when a run starts or ends, and at intervals a line for each run that trains.

Output never decides a sweep: whatever cannot be written is left out.
"""

import time
from collections.abc import Sequence

from polyhead.scale.sweep.job import Job, State
from polyhead.train.messages import print_notice
from polyhead.train.progress import QUIET_SECONDS, wanted


class SweepScreen:
    """The lines about a sweep on standard error."""

    def __init__(self, jobs: Sequence[Job], *, enabled: bool) -> None:
        self.jobs = jobs
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
            states = [job.state for job in self.jobs]
            counts = [f"{states.count(state)} {state}" for state in State if state in states]
            print_notice(f"all: {', '.join(counts)}")

    def tell(self, job: Job, text: str) -> None:
        """Print a line about a run."""
        if self.enabled:
            print_notice(f"{job.label}: {text}")
