"""The states of a run, and ended.json in its folder: why its last worker ended without a result."""

import contextlib
import json
import pathlib
from enum import StrEnum

from polyhead.train.store.files import write

ENDED = "ended.json"


class State(StrEnum):
    """The state of a run.  stopped: no process trains it, and it did not fail."""

    DONE = "done"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"
    STOPPED = "stopped"


def write_end(folder: pathlib.Path, state: State, text: str) -> None:
    """Record how a worker ended; do nothing in a folder that cannot be written."""
    with contextlib.suppress(OSError):
        write(folder / ENDED, (json.dumps({"state": state.value, "said": text}) + "\n").encode())


def read_end(folder: pathlib.Path) -> tuple[State, str] | None:
    """The recorded state and its message; None if the last worker still runs, or if the file is unreadable."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        values = json.loads((folder / ENDED).read_bytes())
        return State(values["state"]), str(values["said"])
    return None
