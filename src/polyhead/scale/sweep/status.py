"""The state of a run, from the files of its folder: done, running, failed, stopped or waiting."""

import pathlib

from polyhead.config import Run, digest
from polyhead.scale.sweep.engines import LOG
from polyhead.train.store.claims import is_claimed
from polyhead.train.store.folder import finished, read_metrics
from polyhead.train.store.state import State, read_end


def place_of(run: Run, folder: str | pathlib.Path) -> pathlib.Path:
    """Return the folder in which a sweep trains a run."""
    return pathlib.Path(folder) / f"{run.name}-{digest(run)}"


def state_of(run: Run, folder: pathlib.Path) -> tuple[State, int, str]:
    """Return the state of a run, its number of steps, and the error of a failed run.

    running: a process trains it, here or elsewhere.  failed: it ended with an error, and no process works on it.
    stopped: no error; the same command resumes it.
    """
    if not folder.is_dir():
        return State.WAITING, 0, ""
    result = finished(folder, digest(run))
    if result is not None:
        return State.DONE, result.steps, ""
    rows = read_metrics(folder)
    step = max((row["step"] for row in rows), default=0)
    if is_claimed(folder):
        return State.RUNNING, step, ""
    end = read_end(folder)
    if end is not None:
        state, message = end
        if state == State.STOPPED:
            message = ""
        return state, step, message
    log = folder / LOG
    if rows or (log.is_file() and log.stat().st_size > 0):
        return State.STOPPED, step, ""
    return State.WAITING, 0, ""
