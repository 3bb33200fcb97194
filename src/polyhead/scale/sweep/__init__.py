"""Many runs side by side: jobs.py (which is next), job.py (one of them), engines/ (what starts workers), status.py, and
what one sees of it: screen.py, board.py."""

from polyhead.scale.sweep.job import Failure
from polyhead.scale.sweep.jobs import sweep
from polyhead.scale.sweep.status import status
from polyhead.train.store.state import State

__all__ = ["Failure", "State", "status", "sweep"]


def __dir__() -> list[str]:
    return sorted(__all__)
