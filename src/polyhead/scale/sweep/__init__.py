"""Many runs in parallel: jobs.py (the queue), job.py (one run), engines/ (they start workers), naming.py (names of
runs), screen.py (lines about progress)."""

from polyhead.scale.sweep.job import Failure, State
from polyhead.scale.sweep.jobs import sweep

__all__ = ["Failure", "State", "sweep"]
