"""A run folder: its lock, config.json, metrics.jsonl, checkpoint.safetensors, result.json."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from filelock import FileLock, Timeout

from polyhead import config as configs
from polyhead.config import Run
from polyhead.spec.files import read_values
from polyhead.spec.values import legal, numbers
from polyhead.train import shipped
from polyhead.train.stop import HELD
from polyhead.train.store.files import Damaged, check_place, delete, path_in_errors, write

CONFIG, METRICS, CHECKPOINT, RESULT = "config.json", "metrics.jsonl", "checkpoint.safetensors", "result.json"
LOCK, FAILURE, EARLIER, DIGEST = ".lock", "failure.txt", "checkpoint-{:08}", "digest"
FIELDS: dict[str, Any] = {"name": str, "digest": str, "steps": int, "seconds": (int, float), "parameters": int}
FIELDS |= {"command": str, "scores": dict, "environment": dict}  # of a result
DATA = ("data.json", "tokenizer.json")  # in which tasks keep what they know of a run's data


@dataclass(frozen=True)
class Result:
    """Result of a finished run.  `scores[split]`: the loss, and each metric's mean and standard error `<metric>_se`."""

    name: str
    digest: str = field(repr=False)
    steps: int
    seconds: float
    parameters: int
    scores: dict[str, dict[str, float]]
    command: str = field(repr=False)
    environment: dict[str, Any] = field(repr=False)
    folder: pathlib.Path = pathlib.Path()


# ------------------------------------------------------------------------------------------------------- configuration
def folder_of(config: Run) -> pathlib.Path:
    """`config.folder`, or by default runs/NAME-DIGEST, which differs for every run."""
    return pathlib.Path(config.folder or folder_in_sweep(config, "runs"))


def folder_in_sweep(config: Run, folder: str | pathlib.Path) -> pathlib.Path:
    """The folder in which a sweep trains a run."""
    return pathlib.Path(folder) / f"{config.name}-{configs.digest(config)}"


def run_path(folder: str | pathlib.Path) -> pathlib.Path:
    """The path of a run; a name from `polyhead list models` is its folder, unless a folder of that name exists here."""
    path = pathlib.Path(folder)
    if path.exists():
        return path
    name = shipped.model_named(str(folder))
    return path if name is None else shipped.folder(name)


def read_config(folder: str | pathlib.Path) -> Run:
    """The run of a folder, of a config file, or of a trained model that comes with polyhead, by name.

    For a config.json, the run's `folder` is set to the present path.

    Raises:
        ValueError: If there is no such run, and as Damaged for a changed config.json.
    """
    from polyhead.tasks import KINDS

    path = run_path(folder)
    if path.is_dir() or path.suffix not in (".json", ".yaml", ".yml"):
        if not path.is_dir():
            problem = "is no folder" if path.exists() else "does not exist"
            raise ValueError(f"run folder: {path} {problem}; trained models: polyhead list models")
        path = path / CONFIG
        if not path.is_file():
            raise ValueError(f"run folder: {path.parent} holds no {CONFIG}, so it is not a run")
    data = read_values(path)
    recorded = None
    if isinstance(data, dict) and path.name == CONFIG:
        recorded = data.pop(DIGEST, None)
    config = configs.from_dict(data, KINDS, where=str(path))
    if not isinstance(config, Run):
        raise ValueError(f"{path}: expected a Run, got a {type(config).__name__}")
    if recorded not in (None, configs.digest(config)):
        text = f'undo that, or train it in another folder without its line "{DIGEST}"'
        raise Damaged(f"{path} is not that of run {recorded}: it is damaged or edited; {text}")
    if path.name == CONFIG:
        return dataclasses.replace(config, folder=str(path.parent))
    return config


# ---------------------------------------------------------------------------------------------------------------- lock
class FolderInUse(ValueError):
    """Another process is training in the folder.  `code`: the worker's exit code."""

    code = HELD


@contextlib.contextmanager
def claim(config: Run, folder: pathlib.Path) -> Iterator[None]:
    """A context that locks `folder` for this process and writes config.json.

    Raises:
        FolderInUse: If another process trains in the folder.
        ValueError: If another run was trained in the folder, or if config.json is of another program.
    """
    from polyhead.train.store.checkpoint import read_metadata

    check_place("run folder", folder / CONFIG)
    with contextlib.ExitStack() as stack:
        try:
            # Who only looks holds the lock for an instant, so both wait a little.
            stack.enter_context(FileLock(folder / LOCK, timeout=0.5))
        except Timeout:
            raise FolderInUse(f"run folder: another process is training in {folder}") from None
        digest, trained = configs.digest(config), checkpoints(folder)
        trained_digest = digest
        if (folder / CONFIG).exists():
            existing = read_values(folder / CONFIG)
            if not isinstance(existing, dict) or existing.get("kind") != "Run":
                raise ValueError(f"run folder: {folder / CONFIG} is not that of a run; choose another folder")
            if trained or (folder / RESULT).exists():
                trained_digest = configs.digest(read_config(folder))
        if trained and trained_digest == digest:  # config.json may be missing, or edited
            with contextlib.suppress(Damaged):
                trained_digest = read_metadata(trained[0])["digest"]
        if trained_digest != digest:
            text = f"another run ({trained_digest}, not {digest}); choose another folder"
            raise ValueError(f"run folder: {folder} already holds {text}")
        values = {DIGEST: digest, **configs.to_dict(dataclasses.replace(config, folder=None))}
        write(folder / CONFIG, (json.dumps(values, indent=2) + "\n").encode())
        yield


def is_claimed(folder: pathlib.Path) -> bool:
    """Is a process training in `folder` now?"""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0.05, poll_interval=0.005):
            return False
    except Timeout:
        return True
    except OSError:  # a folder of another user, which nobody trains in here
        return False


# ----------------------------------------------------------------------------------------------------- result and end
def read_result(folder: str | pathlib.Path) -> Result | None:
    """The result of a run, or None if it is not finished.  Raises Damaged."""
    path = run_path(folder) / RESULT
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
        for name, kind in FIELDS.items():
            if not isinstance(values[name], kind):
                raise TypeError(f"{name} is {values[name]!r:.40}")
        of_result = [values["seconds"], values["parameters"]]
        for split, scores in values["scores"].items():
            values["scores"][split] = numbers(scores)
            of_result += values["scores"][split].values()
        for number in of_result:
            math.isnan(number)  # a TypeError unless it is a number, an OverflowError for an integer that no float holds
        return Result(**values, folder=path.parent)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"{path}: not a result ({error})") from None


def finished(folder: pathlib.Path, digest: str) -> Result | None:
    """The result of this run if it is readable, else None; training reports damage."""
    # The folder of a new run may have the name of a trained model, whose result `read_result` would return.
    if (folder / RESULT).exists():
        with contextlib.suppress(Damaged):
            result = read_result(folder)
            if result is not None and result.digest == digest:
                return result
    return None


def write_result(result: Result) -> None:
    """Write a result for `read_result`."""
    values = dataclasses.asdict(result)
    del values["folder"]
    write(result.folder / RESULT, (json.dumps(legal(values), indent=2) + "\n").encode())


def write_failure(folder: pathlib.Path, text: str) -> None:
    """Record why the last worker failed; do nothing in a folder that cannot be written."""
    with contextlib.suppress(OSError):
        write(folder / FAILURE, f"{text}\n".encode())


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints from which a run can resume, the newest first."""
    paths = []
    for path in folder.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+\.(safetensors|sharded)", path.name):
            paths.append(path)
    paths.sort(key=lambda path: int(path.stem.removeprefix("checkpoint-")), reverse=True)
    if (folder / CHECKPOINT).exists():
        paths.insert(0, folder / CHECKPOINT)
    return paths


def clear(folder: pathlib.Path) -> None:
    """Delete everything that training wrote in `folder`."""
    # The result first, or the run would count as finished; the record of the data last, or checkpoints that are left
    # could go on with other data.
    delete(folder / RESULT)
    for path in checkpoints(folder):
        delete(path)
    for name in (FAILURE, METRICS, *DATA):
        delete(folder / name)


# ------------------------------------------------------------------------------------------------------------- metrics
def cut_metrics(folder: pathlib.Path, step: int, steps: int) -> None:
    """Leave the rows of a run that resumes at `step` of `steps`: those after its checkpoint are trained again."""
    lines = []
    for row in read_metrics(folder):
        is_last_evaluation = row["kind"] == "eval" and row["step"] == steps  # which is repeated
        if row["step"] <= step and not is_last_evaluation:
            lines.append(_line(row))
    write(folder / METRICS, b"".join(lines))


def add_row(folder: pathlib.Path, row: dict[str, Any]) -> None:
    """Append a row to metrics.jsonl.  Raises OSError."""
    with path_in_errors(folder / METRICS), open(folder / METRICS, "ab") as file:
        file.write(_line(row))


def sync_metrics(folder: pathlib.Path) -> None:
    """Write all rows to the disk.  Raises OSError."""
    with path_in_errors(folder / METRICS), open(folder / METRICS, "ab") as file:
        os.fsync(file.fileno())


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(legal(row)) + "\n").encode()


def read_metrics(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """The complete rows of metrics.jsonl so far; null is NaN."""
    path = run_path(folder) / METRICS
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # the end of a row that a kill cut off
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int) and "kind" in row:
                rows.append(numbers(row))
    return rows
