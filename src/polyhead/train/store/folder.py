"""A run folder: config.json, metrics.jsonl, checkpoint.safetensors, result.json."""

import contextlib
import dataclasses
import json
import os
import pathlib
from dataclasses import dataclass
from typing import Any

from polyhead import config as configs
from polyhead.config import Run, serial
from polyhead.train.store import shipped
from polyhead.train.store.files import Damaged, delete, named, write
from polyhead.train.store.state import ENDED

CONFIG, METRICS, CHECKPOINT, RESULT = "config.json", "metrics.jsonl", "checkpoint.safetensors", "result.json"
EARLIER = "checkpoint-{:08}"
DIGEST = "digest"


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a finished run.  `scores[split]`: the loss, and each metric's mean and standard error `<metric>_se`."""

    name: str
    digest: str
    steps: int
    seconds: float
    parameters: int
    scores: dict[str, dict[str, float]]
    command: str
    environment: dict[str, Any]
    folder: pathlib.Path = pathlib.Path()

    def __repr__(self) -> str:
        """
        >>> scores = {"iid": {"loss": 0.25, "r2": 0.5, "r2_se": 0.01}}
        >>> Result("run", "", 9, 1.0, 10, scores, "", {})
        Result('run', 9 steps, iid: loss 0.250 r2 0.500 r2_se 0.010, folder='.')
        """
        text = ""
        for split, scores in self.scores.items():
            text += f"{split}:"
            for name, value in scores.items():
                text += f" {name} {value:.3f}"
            text += ", "
        return f"Result({self.name!r}, {self.steps} steps, {text}folder={str(self.folder)!r})"


# ------------------------------------------------------------------------------------------------------- configuration
def folder_of(config: Run) -> pathlib.Path:
    """`config.folder`, or by default runs/NAME-DIGEST, which differs for every run."""
    return pathlib.Path(config.folder or place_of(config, "runs"))


def place_of(config: Run, folder: str | pathlib.Path) -> pathlib.Path:
    """The folder in which a sweep trains a run."""
    return pathlib.Path(folder) / f"{config.name}-{configs.digest(config)}"


def place(folder: str | pathlib.Path) -> pathlib.Path:
    """The path of a run; a name from `polyhead list models` is its folder, unless a folder of that name exists here."""
    path = pathlib.Path(folder)
    if path.exists():
        return path
    name = shipped.named(str(folder))
    if name is None:
        return path
    return shipped.folder(name)


def read_config(folder: str | pathlib.Path) -> Run:
    """The run of a folder, of a config file, or of a trained model that comes with polyhead, by name.

    Its `folder` is set to its present path.  Raises ValueError, and Damaged for a changed config.json.
    """
    from polyhead.tasks import KINDS

    path = place(folder)
    if path.suffix not in (".json", ".yaml", ".yml"):
        path = _config_in(path)
    data = serial.read(path)
    is_of_folder = path.name == CONFIG
    recorded = None
    if isinstance(data, dict) and is_of_folder:
        recorded = data.pop(DIGEST, None)
    config = configs.from_dict(data, KINDS, where=str(path))
    if not isinstance(config, Run):
        raise ValueError(f"{path}: expected a Run, got a {type(config).__name__}")
    digest = configs.digest(config)
    if recorded not in (None, digest):
        raise Damaged(
            f"{path} was written for run {recorded} but is that of run {digest}: it is damaged or edited; "
            f'undo that, or train it in another folder without its line "{DIGEST}"'
        )
    if not is_of_folder:
        return config
    return dataclasses.replace(config, folder=str(path.parent))


def _config_in(path: pathlib.Path) -> pathlib.Path:
    """The config.json in the folder `path`.  Raises ValueError if there is none."""
    if not path.is_dir():
        raise ValueError(f"run folder: {path} does not exist{shipped.hint(str(path))}")
    if not (path / CONFIG).is_file():
        raise ValueError(f"run folder: {path} holds no {CONFIG}, so it is not a run")
    return path / CONFIG


# -------------------------------------------------------------------------------------------------------------- result
def read_result(folder: str | pathlib.Path) -> Result | None:
    """The result of a run, or None if it is not finished.  Raises Damaged."""
    path = place(folder) / RESULT
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
        values.pop("seal", None)  # a checksum in results until 2026-11
        scores = values["scores"]
        if not isinstance(values["environment"], dict):
            raise TypeError("environment must be a table")
        values["scores"] = {split: serial.numbers(numbers) for split, numbers in scores.items()}
        return Result(**values, folder=path.parent)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: not a result ({error})") from None


def finished(folder: str | pathlib.Path, digest: str) -> Result | None:
    """The result of this run if it is readable, else None; training reports damage."""
    with contextlib.suppress(Damaged):
        result = read_result(folder)
        if result is not None and result.digest == digest:
            return result
    return None


def write_result(result: Result) -> None:
    """Write a result for `read_result`."""
    values = dataclasses.asdict(result)
    del values["folder"]
    write(result.folder / RESULT, (json.dumps(serial.legal(values), indent=2) + "\n").encode())


def checkpoint_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """All checkpoints in `folder`, in no order: the newest, and those named by step."""
    paths = [*folder.glob("checkpoint-*.safetensors"), *folder.glob("checkpoint-*.sharded")]
    if (folder / CHECKPOINT).exists():
        paths.append(folder / CHECKPOINT)
    return paths


def data_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files in which tasks keep what they know of a run's data."""
    from polyhead.tasks.record import RECORD
    from polyhead.tasks.text import tokens as text_tokens

    return [folder / RECORD, folder / text_tokens.FILE]


def clear(folder: pathlib.Path) -> None:
    """Delete everything that training wrote in `folder`."""
    files = [folder / name for name in (ENDED, RESULT, METRICS)]
    for path in (*files, *data_files(folder), *checkpoint_files(folder)):
        delete(path)


# ------------------------------------------------------------------------------------------------------------- metrics
class Metrics:
    """The file metrics.jsonl of a run that resumes at `step` of `steps`: rows up to there stay, all others go."""

    def __init__(self, folder: pathlib.Path, step: int, steps: int) -> None:
        self.path = folder / METRICS
        # Rows after the checkpoint would appear twice, because their steps are trained again.
        rows = []
        for row in read_metrics(folder):
            is_last_evaluation = row["kind"] == "eval" and row["step"] == steps  # which is repeated
            if row["step"] <= step and not is_last_evaluation:
                rows.append(_line(row))
        write(self.path, b"".join(rows))
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row.  Raises OSError."""
        line = _line(row)
        with named(self.path):
            # Without a buffer, one call may write only a part of the row.
            while line:
                line = line[self.file.write(line) :]

    def sync(self) -> None:
        """Write all rows to the disk.  Raises OSError."""
        with named(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(serial.legal(row)) + "\n").encode()


def read_metrics(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """The complete rows of metrics.jsonl so far; null is NaN."""
    path = place(folder) / METRICS
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # the end of a row that a kill cut off
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int) and "kind" in row:
                row.pop("seal", None)  # a checksum in rows until 2026-11
                rows.append(serial.numbers(row))
    return rows
