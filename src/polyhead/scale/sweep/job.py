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
from polyhead.train.store.claims import FolderInUse, claim, is_claimed
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
    """One run of a sweep.  `retries`: how often a worker that dies is started again."""

    def __init__(self, run: Run, folder: pathlib.Path, label: str = "", retries: int = 0) -> None:
        self.run = run
        self.folder = folder
        self.digest = digest(run)
        self.label = label or run.name
        self.retries = retries
        self.deaths = 0
        self.worker: ExitCode | None = None
        self.is_held = False
        """Whether another process trains the run."""
        self.outcome: Result | Failure | None = finished(folder, self.digest)
        self.last_words = ""
        self.has_rows = False
        """Whether the current worker has written rows, so that it is past its start."""
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
        if self.is_held:
            return State.ELSEWHERE
        if self.worker is not None and self.has_rows:
            return State.RUNNING
        if self.deaths:
            return State.RETRYING
        return State.WAITING

    # --------------------------------------------------------------------------------------------------------- starting
    def prepare(self) -> bool:
        """Write the configuration into the folder.  Return False if there is nothing to train here."""
        self.is_held = False
        self.outcome = finished(self.folder, self.digest)
        self.read_rows()
        if self.outcome is not None:
            return False
        try:
            with claim(self.run, self.folder):
                open_log(self.folder).close()
        except FolderInUse:
            self.is_held = True
        except ValueError as error:
            self.outcome = Failure(self.run.name, self.folder, MISTAKE, str(error))
        except OSError as error:
            path = error.filename or self.folder / LOG
            text = f"{path}: cannot be written ({error.strerror})"
            self.outcome = Failure(self.run.name, self.folder, DISK, text)
        return self.outcome is None and not self.is_held

    def start(self, worker: ExitCode) -> None:
        self.worker = worker
        self.has_rows = False

    # ----------------------------------------------------------------------------------------------------------- ending
    def poll(self) -> bool:
        """Read new rows.  Return whether the worker has just ended: with an outcome, a holder, or for a restart."""
        if self.read_rows():
            self.has_rows = True
        if self.worker is None:
            return False
        code = self.worker()
        if code is None:
            return False
        self.read_rows()
        self.worker = None
        self.outcome = finished(self.folder, self.digest)
        if self.outcome is not None:
            return True
        self.last_words = last_words(self.folder / LOG, code)
        # Which ends are final, which are tried again, and which are somebody else's.
        if code == HELD:
            self.is_held = True
        elif code in (MISTAKE, INTERRUPTED):  # the worker has written its end itself
            self._fail(code)
        elif code != PREEMPTED and self.deaths < self.retries:
            self.deaths += 1
            self._note(State.RETRYING, f"({self.deaths} of {self.retries}): {self.last_words}")
        elif code != PREEMPTED:
            self._fail(code)
            self._note(State.FAILED, self.outcome_text())
        return True

    def poll_holder(self) -> bool:
        """Return whether the other process has stopped training the run, with or without a result."""
        self.read_rows()
        self.outcome = finished(self.folder, self.digest)
        self.is_held = self.outcome is None and is_claimed(self.folder)
        return not self.is_held

    def _fail(self, code: int) -> None:
        text = self.last_words
        if self.deaths:
            text += f" ({self.deaths + 1} times)"
        self.outcome = Failure(self.run.name, self.folder, code, text)

    def _note(self, state: State, text: str) -> None:
        """Write into the folder how the worker ended: a killed worker could not."""
        write_end(self.folder, state, text)
        with contextlib.suppress(OSError), open_log(self.folder) as log:
            log.write(f"polyhead: {state} {text}\n".encode())

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

    def outcome_text(self) -> str:
        if isinstance(self.outcome, Failure):
            return self.outcome.error
        return ""

    def text(self) -> str:
        """Return the scores and the progress in words."""
        parts = [f"{name} {score}" for name, score in self.scores.items()]
        if isinstance(self.outcome, Failure):
            return f"failed: {self.outcome.error}"
        if self.outcome is not None:
            parts.append(f"done in {duration(self.outcome.seconds)}")
        elif self.is_held:
            parts.append("trained by another process")
        elif self.worker is not None and self.has_rows:
            parts.append(f"{self.steps_per_second:.1f} steps/s")
        elif self.worker is not None:
            parts = ["starting"]
        else:
            parts = []
        if self.deaths and self.outcome is None:
            parts.append(f"retry {self.deaths} of {self.retries}")
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
