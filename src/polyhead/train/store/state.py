"""The states of a run, and ended.json in its folder: why its last worker ended without a result."""

import contextlib
import json
import pathlib
from enum import StrEnum

from polyhead.train.store.files import seal, unseal, write

ENDED = "ended.json"


class State(StrEnum):
    """The state of a run in a sweep.  stopped: no process trains it, no sweep will start it, and it did not fail."""

    DONE = "done"
    RUNNING = "running"
    WAITING = "waiting"
    RETRYING = "retrying"
    ELSEWHERE = "elsewhere"
    FAILED = "failed"
    STOPPED = "stopped"


def write_end(folder: pathlib.Path, state: State, said: str) -> None:
    """Record how a worker ended; does nothing in a read-only folder."""
    with contextlib.suppress(OSError):
        write(folder / ENDED, (json.dumps(seal({"state": state.value, "said": said})) + "\n").encode())


def read_end(folder: pathlib.Path) -> tuple[State, str] | None:
    """The recorded state and its message; None if the last worker still runs, or if the file is unreadable."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        values = unseal(json.loads((folder / ENDED).read_bytes()), folder / ENDED)
        return State(values["state"]), str(values["said"])
    return None
