"""What has become of the runs of a sweep: done, running, retrying, elsewhere, failed (and why), stopped, waiting."""

import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from polyhead.config import Run, digest, to_dict
from polyhead.scale.sweep.engines import LOG
from polyhead.train.store.claims import claimed_by
from polyhead.train.store.folder import finished, read_metrics
from polyhead.train.store.state import State, read_end


def status(runs: Sequence[Run], folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """A row for each run in `folder`/NAME-DIGEST: name, the fields in which the runs differ, state, step, the headline
    metric of its last evaluated split, and the error of a failed one.

    elsewhere: a process of another machine trains it.  retrying: its worker died, and a sweep is to start it again.
    failed: it left an error and no process works on it; stopped: no error is known, the same command goes on with it.
    """
    rows = []
    differing = _differing(runs)
    for run, fields in zip(runs, differing, strict=True):
        place = pathlib.Path(folder) / f"{run.name}-{digest(run)}"
        state, step, detail = _state(run, place)
        rows.append({"run": run.name, **fields, "state": state, "step": f"{step}/{run.train.steps}", "": detail})
    return rows


def _state(run: Run, place: pathlib.Path) -> tuple[State, int, str]:
    """What a run is, the steps that it has done, and a detail."""
    result = finished(place, digest(run)) if place.is_dir() else None
    if result is not None:
        split = run.train.evaluate[-1] if "compositional" not in run.train.evaluate else "compositional"
        score = result.scores.get(split, {}).get(run.task.metric)  # of another version it may lack
        return State.DONE, result.steps, "" if score is None else f"{split} {run.task.metric} {score:.3f}"
    if not place.is_dir():
        return State.WAITING, 0, ""
    rows = read_metrics(place)
    step = max((row["step"] for row in rows), default=0)
    if (holder := claimed_by(place)) is not None:
        here = holder in ("", platform.node())
        return State.RUNNING if here else State.ELSEWHERE, step, "" if here else f"on {holder}"
    if (end := read_end(place)) is not None:
        state, said = end
        return state, step, "" if state == State.STOPPED else said
    log = place / LOG
    begun = bool(rows) or (log.is_file() and log.stat().st_size > 0)
    return (State.STOPPED, step, "") if begun else (State.WAITING, 0, "")


def _differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The fields, by dotted name, in which the runs differ, with the values of each."""
    flat = [_flat(to_dict(run, semantic=True)) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    vary = [name for name in names if len({repr(one.get(name)) for one in flat}) > 1]
    short = {name: name.rpartition(".")[2] for name in vary}
    clear = {name: short[name] if list(short.values()).count(short[name]) == 1 else name for name in vary}
    return [{clear[name]: one.get(name, "") for name in vary} for one in flat]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        pairs = enumerate(value)  # type: ignore[assignment]
    else:
        return {prefix: value}
    return {k: v for name, one in pairs for k, v in _flat(one, f"{prefix}.{name}" if prefix else str(name)).items()}
