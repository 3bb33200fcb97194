"""One run of a sweep; its state follows from its folder and its worker."""

import contextlib
import math
import os
import pathlib
import time
from dataclasses import dataclass
from typing import Any

from polyhead import config as configs
from polyhead.config import Run
from polyhead.scale.sweep.engines import GONE, LOG, Handle
from polyhead.train.messages import describe_os_error
from polyhead.train.progress import duration
from polyhead.train.stop import DISK, HELD, INTERRUPTED, MISTAKE, PREEMPTED
from polyhead.train.store.claims import FolderInUse, claim, claimed_by
from polyhead.train.store.disk import PASSING
from polyhead.train.store.files import named
from polyhead.train.store.folder import METRICS, Result, finished, read_row
from polyhead.train.store.state import State, write_end


@dataclass(frozen=True)
class Failure:
    """A run whose worker ended without a result: its exit code and the last line of its log."""

    name: str
    folder: pathlib.Path
    code: int
    error: str


class Job:
    """One run of a sweep: its worker, the rows of its metrics.jsonl so far, and its outcome."""

    def __init__(self, config: Run, folder: pathlib.Path, label: str = "", retries: int = 0) -> None:
        self.config, self.folder, self.digest = config, folder, configs.digest(config)
        self.label = label or config.name
        self.handle: Handle | None = None
        self.holder: str | None = None  # host of another process that trains it
        self.outcome: Result | Failure | None = finished(folder, self.digest)
        self.deaths, self.retries, self.said = 0, retries, ""
        self.step, self.rate, self.read = 0, 0.0, 0
        self.seconds = 0.0  # seconds of training up to `step`
        self.started_at = 0.0  # time of its worker's start; 0 without one, or if it resumed
        self.overhead: float | None = None  # seconds of its worker for start and end, without training
        self.training = False  # whether its worker has started training
        self.modified = -1  # mtime of metrics.jsonl before that
        self.shown: dict[str, str] = {}
        self._follow()

    @property
    def state(self) -> State:
        if self.outcome is not None:
            return State.DONE if isinstance(self.outcome, Result) else State.FAILED
        if self.holder is not None:
            return State.ELSEWHERE
        if self.handle is not None and self.training:
            return State.RUNNING
        return State.RETRYING if self.deaths else State.WAITING

    @property
    def pace(self) -> float | None:
        """Seconds per step, including evaluations."""
        if isinstance(self.outcome, Result):
            return self.outcome.seconds / max(1, self.outcome.steps)
        if self.seconds and self.step > 1:
            return self.seconds / self.step
        return 1 / self.rate if self.rate else None

    def ready(self) -> bool:
        """Write the configuration into the folder; False if there is nothing to train here."""
        self.folder.parent.stat()  # raises while a network share is offline: the sweep waits
        self.holder, self.outcome = None, finished(self.folder, self.digest)
        self._follow()  # after the result: a run that another process has finished shows its last rows
        if self.outcome is not None:
            return False
        self.training, self.modified = False, self._changed()
        self.started_at = time.monotonic() if self.step == 0 else 0.0
        try:
            with claim(self.config, self.folder), named(self.folder / LOG):
                open(self.folder / LOG, "ab").close()
        except FolderInUse:
            self.holder = claimed_by(self.folder) or ""
        except ValueError as error:
            self.outcome = Failure(self.config.name, self.folder, MISTAKE, str(error))
        except OSError as error:  # an error of only this run's folder
            if error.errno in PASSING:
                raise
            self.outcome = Failure(self.config.name, self.folder, DISK, describe_os_error(error))
        return self.outcome is None and self.holder is None

    def poll(self) -> bool:
        """Read new rows; True if the worker has just ended: with an outcome, with a holder, or for a restart."""
        self._follow()
        if self.handle is None:
            return False
        if not self.training and self._changed() != self.modified:
            self.training = True
            self._record_overhead(self.seconds)
        code = self.handle.code()
        if code is None:
            return False
        self._follow()
        self.handle, self.outcome = None, finished(self.folder, self.digest)
        if isinstance(self.outcome, Result):
            self._record_overhead(self.outcome.seconds)
        elif self.outcome is None:
            self._ended(code)
        return True

    def _record_overhead(self, seconds: float) -> None:
        """Record the worker's overhead: the time since its start, minus `seconds` of training."""
        if self.started_at:
            self.overhead = max(0.0, time.monotonic() - self.started_at - seconds)

    def _ended(self, code: int) -> None:
        """Handle a worker that ended without a result: another process trains the run, it failed, or it restarts."""
        self.said = said = last_line(self.folder / LOG, code)
        if code == HELD:  # another process was quicker
            self.holder = claimed_by(self.folder) or ""
        elif code in (MISTAKE, INTERRUPTED):  # the worker has recorded it
            self._fail(code, said)
        elif code != PREEMPTED and self.deaths >= self.retries:
            self._note(State.FAILED, self._fail(code, said))
        elif code != PREEMPTED:
            self.deaths += 1
            self._note(State.RETRYING, f"({self.deaths} of {self.retries}): {said}", "started again ")

    def _fail(self, code: int, said: str) -> str:
        text = said + (f" ({self.deaths + 1} times)" if self.deaths else "")
        self.outcome = Failure(self.config.name, self.folder, code, text)
        return text

    def _note(self, state: State, text: str, what: str = "") -> None:
        """Record the end in the folder, because a killed worker cannot."""
        write_end(self.folder, state, text)
        with contextlib.suppress(OSError), open(self.folder / LOG, "a", encoding="utf-8") as log:
            log.write(f"polyhead: {what}{text}\n")

    def look(self) -> bool:
        """Whether the other process has stopped training the run, with or without a result."""
        self.outcome = finished(self.folder, self.digest)
        self._follow()
        self.holder = claimed_by(self.folder) if self.outcome is None else None
        return self.holder is None

    def _changed(self) -> int:
        try:
            return (self.folder / METRICS).stat().st_mtime_ns
        except OSError:
            return -1

    def _follow(self) -> None:
        try:
            with open(self.folder / METRICS, "rb") as file:
                if file.seek(0, os.SEEK_END) < self.read:
                    self.read = 0  # a resumed run has truncated the file
                file.seek(self.read)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
                self._show(read_row(line))

    def _show(self, row: dict[str, Any]) -> None:
        metric, self.step = self.config.task.metric, int(row["step"])
        self.seconds = seconds if math.isfinite(seconds := float(row.get("seconds", 0.0))) else 0.0
        if row["kind"] == "train":
            self.rate = rate if math.isfinite(rate := float(row["steps_per_second"])) else 0.0
            self.shown["loss"] = f"{row['loss']:.4f}"
        elif row["kind"] == "eval":
            self.shown[f"{row['split']} {metric}"] = f"{row[metric]:.3f}"

    def text(self) -> str:
        shown = "  ".join(f"{name} {value}" for name, value in self.shown.items())
        if isinstance(self.outcome, Failure):
            return f"failed: {self.outcome.error}"
        if self.outcome is not None:
            return f"{shown}  done in {duration(self.outcome.seconds)}".strip()
        if self.holder is not None:
            return f"{shown}  trained by another process{f' on {self.holder}' if self.holder else ''}".strip()
        retry = f"  retry {self.deaths} of {self.retries}" if self.deaths else ""
        if not self.training:
            return retry.strip()
        left = (self.config.train.steps - self.step) * (self.pace or 0.0)
        return (f"{shown}  {self.rate:.1f} steps/s  {duration(left)} left" if self.rate else "starting") + retry


def last_line(path: pathlib.Path, code: int) -> str:
    """The last line of a worker's log, or a description of its end."""
    if code == GONE:
        return "lost: its machine, or its job, is gone"
    try:
        lines = path.read_text(errors="replace", encoding="utf-8").strip().splitlines()
    except OSError:
        lines = []
    said = lines[-1].removeprefix("polyhead: ") if lines else ""
    return said if code > 0 and said else f"killed by signal {-code}" if code < 0 else f"no result (exit code {code})"
