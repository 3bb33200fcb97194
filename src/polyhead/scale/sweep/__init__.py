"""Many runs side by side: jobs.py (which is next), job.py (one of them), engines/ (what starts workers), status.py, and
what one sees of it: screen.py, board.py."""

from polyhead.scale.sweep.job import Failure, State
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.status import status

__all__ = ["Failure", "State", "status", "sweep"]
