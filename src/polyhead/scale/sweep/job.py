"""One run of a sweep: its worker, what its rows say, and how it ended."""

import contextlib
import json
import os
import pathlib
from dataclasses import dataclass
from typing import Any

from polyhead.config import Run, digest
from polyhead.scale.sweep.engines import LOG, LOST, ExitCode, open_log
from polyhead.train.progress import duration
from polyhead.train.stop import DISK, HELD, INTERRUPTED, MISTAKE, PREEMPTED
from polyhead.train.store.claims import FolderInUse, claim
from polyhead.train.store.folder import METRICS, Result, finished
from polyhead.train.store.state import State, write_end


@dataclass(frozen=True)
class Failure:
    """A run whose worker ended without a result: its exit code and the last line of its log."""

    name: str
    folder: pathlib.Path
    code: int
    error: str


class Job:
    """One run of a sweep, which waits, is trained by a worker, and then has an outcome."""

    def __init__(self, run: Run, folder: pathlib.Path, label: str = "") -> None:
        self.run = run
        self.folder = folder
        self.digest = digest(run)
        self.label = label or run.name
        self.worker: ExitCode | None = None
        self.outcome: Result | Failure | None = finished(folder, self.digest)
        self.has_rows = False
        """Whether the worker has written rows, so that it is past its start."""
        self.step = 0
        self.steps_per_second = 0.0
        self.scores: dict[str, str] = {}
        """The latest loss, and the latest main metric of each split, as text."""
        self.position = 0
        self.read_rows()

    @property
    def state(self) -> State:
        if isinstance(self.outcome, Result):
            return State.DONE
        if self.outcome is not None:
            return State.FAILED
        if self.has_rows:
            return State.RUNNING
        return State.WAITING

    # ------------------------------------------------------------------------------------------- from start to outcome
    def prepare(self) -> bool:
        """Write the configuration into the folder.  Return False if there is nothing to train here."""
        self.outcome = finished(self.folder, self.digest)  # perhaps of another sweep, since this one began
        if self.outcome is not None:
            return False
        try:
            with claim(self.run, self.folder):
                open_log(self.folder).close()
        except FolderInUse as error:
            self._fail(HELD, str(error))
        except ValueError as error:
            self._fail(MISTAKE, str(error))
        except OSError as error:
            path = error.filename or self.folder / LOG
            self._fail(DISK, f"{path}: cannot be written ({error.strerror})")
        return self.outcome is None

    def poll(self) -> bool:
        """Read new rows.  Return whether the worker has just ended, with a result or a failure."""
        self.has_rows = self.read_rows() or self.has_rows
        if self.worker is None:
            return False
        code = self.worker()
        if code is None:
            return False
        self.read_rows()
        self.outcome = finished(self.folder, self.digest)
        if self.outcome is None:
            text = last_words(self.folder / LOG, code)
            self._fail(code, text)
            # After these codes the worker has noted its end itself, or another process trains in the folder.
            if code not in (MISTAKE, INTERRUPTED, PREEMPTED, HELD):
                write_end(self.folder, State.FAILED, text)
        return True

    def _fail(self, code: int, text: str) -> None:
        self.outcome = Failure(self.run.name, self.folder, code, text)

    # --------------------------------------------------------------------------------------------------------- progress
    def read_rows(self) -> bool:
        """Read the rows of metrics.jsonl that are new since the last call; return whether there were any."""
        try:
            with open(self.folder / METRICS, "rb") as file:
                if file.seek(0, os.SEEK_END) < self.position:
                    self.position = 0  # a resumed run has truncated the file
                file.seek(self.position)
                text = file.read()
        except OSError:
            return False
        complete_rows = text[: text.rfind(b"\n") + 1]
        self.position += len(complete_rows)
        for line in complete_rows.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                self._read_row(json.loads(line))
        return bool(complete_rows)

    def _read_row(self, row: dict[str, Any]) -> None:
        self.step = int(row["step"])
        if row["kind"] == "train":
            self.scores["loss"] = f"{row['loss']:.4f}"
            self.steps_per_second = float(row["steps_per_second"])
        elif row["kind"] == "eval":
            metric = self.run.task.metric
            self.scores[f"{row['split']} {metric}"] = f"{row[metric]:.3f}"

    def seconds_per_step(self) -> float | None:
        """Return the measured seconds of a step; None if unknown."""
        if isinstance(self.outcome, Result):
            return self.outcome.seconds / max(1, self.outcome.steps)
        if self.steps_per_second <= 0:
            return None
        return 1 / self.steps_per_second

    def text(self) -> str:
        """Return the scores and the progress in words."""
        parts = [f"{name} {score}" for name, score in self.scores.items()]
        if isinstance(self.outcome, Failure):
            return f"failed: {self.outcome.error}"
        if self.outcome is not None:
            parts.append(f"done in {duration(self.outcome.seconds)}")
        elif self.has_rows:
            parts.append(f"{self.steps_per_second:.1f} steps/s")
        elif self.worker is not None:
            return "starting"
        else:
            return ""
        return "  ".join(parts)


def last_words(log: pathlib.Path, code: int) -> str:
    """Return the last line of a worker's log, or a description of how the worker ended."""
    if code == LOST:
        return "lost: its machine, or its job, is gone"
    if code < 0:
        return f"killed by signal {-code}"
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if lines and code > 0:
        return lines[-1].removeprefix("polyhead: ")
    return f"no result (exit code {code})"
