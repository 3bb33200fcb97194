"""The states of the runs of a sweep: done, running, retrying, failed (and why), stopped, waiting."""

import pathlib
from collections.abc import Sequence
from typing import Any

from polyhead.config import Run, digest
from polyhead.scale.sweep.engines import LOG
from polyhead.scale.sweep.naming import differing
from polyhead.train.store.claims import is_claimed
from polyhead.train.store.folder import Result, finished, read_metrics
from polyhead.train.store.state import State, read_end


def status(runs: Sequence[Run], folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Return a row for each run in `folder`/NAME-DIGEST.

    It has the name, the fields in which runs differ, the state, the step, and a detail: the main metric on the last
    evaluated split, or the error of a failed run.

    running: a process trains it, here or elsewhere.  retrying: its worker died, and a sweep will start it again.
    failed: it ended with an error, and no process works on it.  stopped: no error; the same command resumes it.
    """
    rows = []
    for run, fields in zip(runs, differing(runs), strict=True):
        state, step, detail = state_of(run, place_of(run, folder))
        rows.append({"run": run.name, **fields, "state": state, "step": f"{step}/{run.train.steps}", "": detail})
    return rows


def place_of(run: Run, folder: str | pathlib.Path) -> pathlib.Path:
    """Return the folder in which a sweep trains a run."""
    return pathlib.Path(folder) / f"{run.name}-{digest(run)}"


def state_of(run: Run, folder: pathlib.Path) -> tuple[State, int, str]:
    """Return the state of a run, its number of steps, and a detail: the score, the host, or the error."""
    if not folder.is_dir():
        return State.WAITING, 0, ""
    result = finished(folder, digest(run))
    if result is not None:
        return State.DONE, result.steps, score_text(run, result)
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


def score_text(run: Run, result: Result) -> str:
    """Return the main metric on unseen combinations, or on the last split; empty without evaluations."""
    splits = run.train.evaluate
    if not splits:
        return ""
    split = splits[-1]
    if "compositional" in splits:
        split = "compositional"
    score = result.scores.get(split, {}).get(run.task.metric)
    if score is None:
        return ""
    return f"{split} {run.task.metric} {score:.3f}"
