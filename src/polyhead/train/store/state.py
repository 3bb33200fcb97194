"""What may become of a run, and how its last worker ended without a result: ended.json in its folder."""

import contextlib
import json
import pathlib
from enum import StrEnum

from polyhead.train.store.files import forget, seal, unseal, write

ENDED = "ended.json"


class State(StrEnum):
    """What a run of a sweep may be; stopped: nobody works on it, no sweep is to start it, and it did not fail."""

    DONE = "done"
    RUNNING = "running"
    WAITING = "waiting"
    RETRYING = "retrying"
    ELSEWHERE = "elsewhere"
    FAILED = "failed"
    STOPPED = "stopped"


def write_end(folder: pathlib.Path, state: State, said: str) -> None:
    """Note how a worker ended; a folder in which nothing can be written stays as it is."""
    with contextlib.suppress(OSError):
        write(folder / ENDED, (json.dumps(seal({"state": state.value, "said": said})) + "\n").encode())


def read_end(folder: pathlib.Path) -> tuple[State, str] | None:
    """The state and what was said; None where no worker has ended since one last began, or nobody can tell."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        values = unseal(json.loads((folder / ENDED).read_bytes()), folder / ENDED)
        return State(values["state"]), str(values["said"])
    return None


def forget_end(folder: pathlib.Path) -> None:
    """A process trains here now."""
    forget(folder / ENDED)
