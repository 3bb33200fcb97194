"""A run folder: config.json, metrics.jsonl, checkpoint.safetensors, result.json."""

import contextlib
import dataclasses
import datetime
import errno
import io
import json
import os
import pathlib
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from polyhead import config as configs
from polyhead.config import Run, serial
from polyhead.spec.notebook import as_table
from polyhead.train import products
from polyhead.train.messages import print_notice
from polyhead.train.store import shipped
from polyhead.train.store.disk import Retry, once
from polyhead.train.store.files import DAMAGED, Damaged, forget, named, seal, unseal, write
from polyhead.train.store.state import ENDED

CONFIG, METRICS, CHECKPOINT, RESULT = "config.json", "metrics.jsonl", "checkpoint.safetensors", "result.json"
EARLIER, BEST, BAD_BATCH = "checkpoint-{:08}", "best.safetensors", "bad_batch.safetensors"
SENT = "rows.txt"
"""In the folder of each tracker (tracking.py): the rows that it has received."""
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
        scores = "; ".join(f"{split}: {', '.join(found)}" for split, found in self._shown().items())
        return f"Result({self.name!r}, {self.steps} steps, {scores or 'no scores'}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        about = {"steps": self.steps, "parameters": f"{self.parameters:,}", "seconds": f"{self.seconds:.0f}"}
        return as_table(f"Result of {self.name}", {**self._shown(), **about, "folder": self.folder})

    def _shown(self) -> dict[str, list[str]]:
        """
        >>> scores = {"iid": {"loss": 0.25, "r2": 0.5, "r2_se": 0.01, "sequences": 64}}
        >>> Result("run", "", 9, 1.0, 10, scores, "", {})._shown()
        {'iid': ['loss 0.250', 'r2 0.500 ± 0.010']}
        """
        return {
            split: [
                f"{name} {value:.3f}" + (f" ± {found[f'{name}_se']:.3f}" if f"{name}_se" in found else "")
                for name, value in found.items()
                if isinstance(value, float) and not name.endswith("_se")
            ]
            for split, found in self.scores.items()
        }


def folder_of(config: Run) -> pathlib.Path:
    """`config.folder`, or by default runs/NAME-DIGEST, which differs for every run."""
    return pathlib.Path(config.folder or f"runs/{config.name}-{configs.digest(config)}")


def place(folder: str | pathlib.Path) -> pathlib.Path:
    """The path of a run; a name from `polyhead list models` is its folder, unless a folder of that name exists here."""
    path = pathlib.Path(folder)
    name = None if path.exists() else shipped.named(str(folder))
    return path if name is None else shipped.folder(name)


def read_config(folder: str | pathlib.Path) -> Run:
    """The run of a folder, of a config file, or of a trained model that comes with polyhead, by name.

    Its `folder` is set to its present path.
    """
    from polyhead.tasks import KINDS

    path = place(folder)
    if path.suffix not in (".json", ".yaml", ".yml"):
        if not path.is_dir():
            raise ValueError(f"run folder: {path} does not exist{shipped.hint(str(path))}")
        path = path / CONFIG
        if not path.is_file():
            inside = len(list(pathlib.Path(folder).glob(f"*/{CONFIG}")))
            hint = f"; of the {inside} runs in it, name one, or {path.parent}/*" if inside else _written_again(path)
            raise ValueError(f"run folder: {path.parent} holds no {CONFIG}, so it is not a run{hint}")
    try:
        data = serial.read(path)
    except ValueError as error:
        raise ValueError(f"{error}{_written_again(path)}") from None
    said = data.pop(DIGEST, None) if isinstance(data, dict) and path.name == CONFIG else None
    try:
        config = configs.from_dict(data, KINDS, where=str(path))
    except ValueError as error:
        if said is None or not re.search("unknown (field|kind)", str(error)):
            raise
        raise type(error)(f"{error}; it was edited, or written by another version of polyhead") from None
    if not isinstance(config, Run):
        raise ValueError(f"{path}: a Run was wanted but a {type(config).__name__} came")
    if said not in (None, mine := configs.digest(config)):
        way_on = f'if it is meant as it is, delete its line "{DIGEST}"'
        if saves(path.parent):
            way_on = f'undo that, or train it in another folder, without its line "{DIGEST}"'
        raise Damaged(f"{path} was written for run {said} but is that of run {mine}: it is damaged or edited; {way_on}")
    return dataclasses.replace(config, folder=str(path.parent)) if path.name == CONFIG else config


def _written_again(path: pathlib.Path) -> str:
    """How a lost or damaged config.json of a run that has checkpoints comes back."""
    if path.name != CONFIG or not saves(path.parent):
        return ""
    return f"; `polyhead train RECIPE --folder {path.parent}` with the recipe and fields of the run writes it again"


def read_result(folder: str | pathlib.Path) -> Result | None:
    """The result of a run, or None if it is not finished.  Raises Damaged."""
    path = place(folder) / RESULT
    if not path.is_file():
        return None
    try:
        values = unseal(json.loads(path.read_bytes()), path)
        scores, about = (values.get(name, {}) for name in ("scores", "environment"))
        tables = (scores, about, *(scores.values() if isinstance(scores, dict) else ()))
        if not all(isinstance(table, dict) for table in tables):
            raise TypeError("scores and environment must be tables")
        values["scores"] = {split: serial.numbers(found) for split, found in scores.items()}
        return Result(**values, folder=path.parent)
    except Damaged:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{path}: not a result ({error})") from None


def finished(folder: str | pathlib.Path, digest: str) -> Result | None:
    """The result of this run if it is readable, else None; training reports damage."""
    with contextlib.suppress(Damaged):
        if (result := read_result(folder)) is not None and result.digest == digest:
            return result
    return None


def write_result(result: Result) -> None:
    """Write a result for `read_result`."""
    values = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "folder"}
    write(result.folder / RESULT, (json.dumps(_sealed(values), indent=2) + "\n").encode())


def saves(folder: pathlib.Path) -> list[pathlib.Path]:
    """All checkpoints in `folder` except the best: the newest, and those named by step."""
    found = [folder / CHECKPOINT, *folder.glob("checkpoint-*.safetensors"), *folder.glob("checkpoint-*.sharded")]
    return [path for path in found if path.exists()]


def clear(folder: pathlib.Path) -> None:
    """Delete everything that training wrote in `folder`."""
    from polyhead.tasks.record import RECORD
    from polyhead.tasks.text import tokens as text_tokens

    names = (ENDED, RESULT, METRICS, BEST, BAD_BATCH, text_tokens.FILE, RECORD)
    told = folder.glob(f"*/{SENT}")  # trackers restart
    for path in [*(folder / name for name in names), *saves(folder), *folder.glob("*" + DAMAGED), *told]:
        forget(path)


class Metrics:
    """The rows of metrics.jsonl, each with a checksum.

    On opening, undamaged rows that `keep` accepts stay.  If they are fewer than the `wanted` rows of the checkpoint, it
    prints a line.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        keep: Callable[[dict[str, Any]], bool],
        retry: Retry = once,
        wanted: int = 0,
    ) -> None:
        self.path, self.retry, self.keep = folder / METRICS, retry, keep
        kept = kept_rows(folder, keep, wanted)
        text = b"".join(map(_line, kept))
        write(self.path, text)
        self.count = len(kept)
        self.size = len(text)
        self.file: io.FileIO | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Append a row.  Raises OSError for an error that `retry` does not retry."""
        self.retry(lambda: self._try(lambda file: self._append(file, _line(row))))
        self.count += self.keep(row)

    def sync(self) -> int:
        """Flush all rows to disk; returns the number of rows that a resumed run keeps."""
        self.retry(lambda: self._try(lambda file: os.fsync(file.fileno())))
        return self.count

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file = None

    def _try(self, do: Callable[[io.FileIO], None]) -> None:
        """Call `do` with the file; after an error it is reopened, because a network share may have been offline."""
        try:
            with named(self.path):
                if self.file is None:
                    self.file = self._opened()
                do(self.file)
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            self.file = None
            raise

    def _opened(self) -> io.FileIO:
        file = io.FileIO(os.open(self.path, os.O_WRONLY | os.O_APPEND), "ab")
        there = os.fstat(file.fileno()).st_size
        if there > self.size:  # an incomplete row
            os.ftruncate(file.fileno(), self.size)
        elif there < self.size:
            print_notice(f"{self.path}: the last rows were lost with the disk")
            self.size = there + file.write(b"\n")
        return file

    def _append(self, file: io.FileIO, line: bytes) -> None:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(line)


def kept_rows(folder: pathlib.Path, keep: Callable[[dict[str, Any]], bool], wanted: int) -> list[dict[str, Any]]:
    """The rows that `keep` accepts; prints a line if they are fewer than `wanted`."""
    kept = [row for row in read_metrics(folder) if keep(row)]
    if (lost := wanted - len(kept)) > 0:
        print_notice(
            f"{folder / METRICS}: {lost} of {wanted} rows are lost or damaged; curves have a gap there, nothing else"
        )
    return kept


def is_past(row: dict[str, Any], step: int, steps: int) -> bool:
    """Whether a run of `steps` resumed at `step` keeps a row: all except the final evaluation, which is repeated."""
    return row["step"] <= step and not (row["kind"] == "eval" and row["step"] == steps)


def expected(steps: int, vouched: int, result: Result | None) -> tuple[Callable[[dict[str, Any]], bool], int]:
    """Which rows a run of `steps` should have (a predicate), and how many.

    These are the rows that its last checkpoint counts and, for a finished run, the last evaluation of each split.
    """
    if result is None:
        return lambda row: is_past(row, steps, steps), vouched
    return lambda row: row["step"] <= steps, vouched + len(result.scores)


def _line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(_sealed(row)) + "\n").encode()


def _sealed(values: Mapping[str, object]) -> Mapping[str, object]:
    return seal({name: serial.legal(value) for name, value in values.items()})


def read_row(line: bytes, path: pathlib.Path | str = METRICS) -> dict[str, Any]:
    """A row of metrics.jsonl; null is NaN, except as the norm of a gradient.  Raises ValueError."""
    row = unseal(json.loads(line), path)
    return serial.numbers(row) | ({"grad_norm": row["grad_norm"]} if "grad_norm" in row else {})


def read_metrics(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """The complete rows of metrics.jsonl so far."""
    path = place(folder) / METRICS
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = read_row(line, path)
        except (ValueError, RecursionError):
            continue
        if isinstance(row.get("step"), int) and "kind" in row:
            rows.append(row)
    return rows


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of a run: versions, machine, threads, device, matrix products (products.py), date."""
    try:
        version = metadata.version("polyhead")
    except metadata.PackageNotFoundError:  # not installed: run from the source tree
        version = "source"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "polyhead": version,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": f"{device.type} ({name})" if name else device.type,
        **({"products": str(products.in_force())} if device.type == "cpu" else {}),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
