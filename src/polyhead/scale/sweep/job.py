"""One run of a sweep: its worker, its progress, and how it ended."""

import contextlib
import pathlib
from dataclasses import dataclass
from enum import StrEnum

from polyhead.config import Run, digest
from polyhead.scale.sweep.engines import LOG, NO_EXIT_CODE, ExitCode
from polyhead.train.progress import duration
from polyhead.train.stop import DISK, HELD, INTERRUPTED, MISTAKE, PREEMPTED
from polyhead.train.store.folder import Result, claim, finished, read_metrics, write_failure


class State(StrEnum):
    """The state of a run.  stopped: no process trains it, and it did not fail."""

    DONE = "done"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Failure:
    """A run whose worker ended without a result: its name in the sweep, its exit code and the last line of its log."""

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

    @property
    def state(self) -> State:
        if isinstance(self.outcome, Result):
            return State.DONE
        if self.outcome is not None:
            return State.FAILED
        if self.worker is not None:
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
                open(self.folder / LOG, "ab").close()
        except ValueError as error:
            self._fail(getattr(error, "code", MISTAKE), str(error))  # FolderInUse has a code
        except OSError as error:
            path = error.filename or self.folder / LOG
            self._fail(DISK, f"{path}: cannot be written ({error.strerror})")
        return self.outcome is None

    def poll(self) -> bool:
        """Return whether the worker has just ended, with a result or a failure."""
        assert self.worker is not None
        code = self.worker()
        if code is None:
            return False
        self.outcome = finished(self.folder, self.digest)
        if self.outcome is None:
            text = last_words(self.folder / LOG, code)
            self._fail(code, text)
            # After these codes the worker has noted its end itself, or another process trains in the folder.
            if code not in (MISTAKE, INTERRUPTED, PREEMPTED, HELD):
                write_failure(self.folder, text)
        return True

    def _fail(self, code: int, text: str) -> None:
        self.outcome = Failure(self.label, self.folder, code, text)

    # --------------------------------------------------------------------------------------------------------- progress
    def progress(self) -> str:
        """Read the rows of the run; return its step, its latest scores and its speed in words."""
        metric = self.run.task.metric
        words: dict[str, str] = {}
        for row in read_metrics(self.folder):
            words["step"] = f"step {row['step']}/{self.run.train.steps}"
            if row["kind"] == "train":
                words["loss"] = f"loss {row.get('loss', 0.0):.3f}"
                words["speed"] = f"{row.get('steps_per_second', 0.0):.1f} steps/s"
            elif row["kind"] == "eval" and metric in row:
                words[str(row.get("split"))] = f"{row.get('split')} {metric} {row[metric]:.3f}"
        return "  ".join(words.values()) or "starting"

    def ending(self) -> str:
        """Return the scores of a result, or the reason of a failure, in words."""
        if isinstance(self.outcome, Failure):
            return f"failed: {self.outcome.error}"
        if self.outcome is None:
            return ""
        metric, parts = self.run.task.metric, []
        for split, scores in self.outcome.scores.items():
            if metric in scores:
                parts.append(f"{split} {metric} {scores[metric]:.3f}")
        return "  ".join([*parts, f"done in {duration(self.outcome.seconds)}"])


def last_words(log: pathlib.Path, code: int) -> str:
    """Return the last line of a worker's log, or a description of how the worker ended."""
    if code == NO_EXIT_CODE:
        return "lost: its machine, or its job, is gone"
    if code < 0:
        return f"killed by signal {-code}"
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if lines and code > 0:
        return lines[-1].removeprefix("polyhead: ")
    return f"no result (exit code {code})"
