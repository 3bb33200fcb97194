"""Optional trackers beside metrics.jsonl: TensorBoard, Weights & Biases, trackio.

Each tracker is imported and runs in its own thread.  The training loop only puts rows into a queue, so it never waits.
An error ends the tracker with one line on standard error; the run continues.  RUN/<tracker>/rows.txt lists the rows
that the tracker has received.  So a resumed run sends each row once, and a tracker that is added later gets the earlier
rows.
"""

import importlib
import itertools
import json
import os
import pathlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polyhead import config as configs
from polyhead.config import Run
from polyhead.spec.optional import is_installed
from polyhead.spec.shapes import one_of
from polyhead.train.messages import print_notice
from polyhead.train.store.files import one_line
from polyhead.train.store.folder import SENT, Metrics, Result, read_metrics

BEHIND = 10_000
"""The longest queue of rows; a tracker that is slower is turned off."""
PATIENCE = 60.0
"""Seconds that a finished run waits for each tracker."""

Row = dict[str, Any]
Values = dict[str, float]


class Tracker(Protocol):
    """A run in a tracking service."""

    def log(self, values: Values, step: int) -> None:
        """Log numbers by name at a step.  A killed process may lose buffered rows, see docs/tracking.md."""

    def close(self, done: bool) -> None:
        """End the tracked run.  `done`: whether the run has a result."""


class _TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, config: Run, folder: pathlib.Path, fresh: bool) -> None:
        place = folder / "tensorboard"
        if fresh:
            for old in place.glob("events.*"):
                old.unlink()
        self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(place))
        if fresh:
            text = json.dumps(configs.to_dict(config), indent=2)
            self.writer.add_text("config", "\n".join("    " + line for line in text.splitlines()))  # Markdown's code

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, done: bool) -> None:
        self.writer.close()


class _Wandb:
    """A run of a Weights & Biases project; files in RUN/wandb.  WANDB_* variables such as WANDB_MODE=offline work."""

    def __init__(self, config: Run, folder: pathlib.Path, fresh: bool) -> None:
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "polyhead"),
            id=configs.digest(config),
            name=config.name,
            dir=str(folder),
            config=configs.to_dict(config),
            resume=None if fresh else "allow",
            reinit="create_new",  # several runs may be open in this process
            settings=wandb.Settings(console="off", silent=True, init_timeout=PATIENCE),
        )
        self.run.define_metric("*", step_metric="step")  # its default step counter rejects a repeated step

    def log(self, values: Values, step: int) -> None:
        self.run.log({"step": step, **values})

    def close(self, done: bool) -> None:
        self.run.finish(exit_code=0 if done else 1)


class _Trackio:
    """A run of a trackio project, in trackio's own folder (TRACKIO_DIR)."""

    def __init__(self, config: Run, folder: pathlib.Path, fresh: bool) -> None:
        self.run = importlib.import_module("trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", "polyhead"),
            name=f"{config.name}-{configs.digest(config)}",
            config=configs.to_dict(config),
            resume="never" if fresh else "allow",
            embed=False,
        )

    def log(self, values: Values, step: int) -> None:
        self.run.log(values, step=step)

    def close(self, done: bool) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Run, pathlib.Path, bool], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}
"""Trackers by name, and by the name of their package."""


def check(names: Sequence[str]) -> None:
    """Raise a ValueError for an unknown or missing tracker; nothing is imported."""
    for name in names:
        one_of("tracking", "tracker", name, TRACKERS)
        if not is_installed(name):
            package = "'polyhead[track]'" if name == "tensorboard" else name
            raise ValueError(f"tracking: {name} is not installed: pip install {package}, or leave it out of track")


class TrackedMetrics:
    """Writes the rows of a run into metrics.jsonl and sends them to the trackers of `config.track`."""

    def __init__(self, config: Run, metrics: Metrics) -> None:
        self.metrics, folder = metrics, metrics.path.parent
        names = tuple(dict.fromkeys(config.track))
        past = [_entry(row) for row in read_metrics(folder)] if names else []
        self.threads = [_Thread(name, config, folder, past) for name in names]

    def add(self, row: Row) -> None:
        """Append a row.  Raises OSError on a full disk."""
        self.metrics.add(row)
        if self.threads:
            self._put(_entry(row))

    def finish(self, result: Result) -> None:
        """Send the result to the trackers."""
        values = {f"{split}/{name}": value for split, scores in result.scores.items() for name, value in scores.items()}
        values |= {"seconds": result.seconds, "parameters": result.parameters}
        self._put(_Entry("result", result.steps, {f"result/{name}": value for name, value in values.items()}))

    def _put(self, entry: "_Entry") -> None:
        for thread in self.threads:
            thread.put(entry)

    def sync(self) -> int:
        return self.metrics.sync()

    def close(self) -> None:
        """Close the file; wait for each tracker, at most `PATIENCE` seconds."""
        self.metrics.close()
        for thread in self.threads:
            thread.put(None)
        for thread in self.threads:
            thread.leave()


@dataclass(frozen=True)
class _Entry:
    """A row for trackers, with a unique name."""

    name: str
    step: int
    values: Values


def _entry(row: Mapping[str, Any]) -> _Entry:
    """
    >>> _entry({"kind": "eval", "step": 500, "split": "iid", "r2": 0.5, "seconds": 3.0})
    _Entry(name='eval 500 iid', step=500, values={'iid/r2': 0.5, 'iid/seconds': 3.0})
    """
    split = row.get("split", "")
    head = split or {"train": "training"}.get(row["kind"], row["kind"])  # a split may also be called `train`
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
    name = f"{row['kind']} {row['step']} {split}".strip()
    return _Entry(name, row["step"], {f"{head}/{key}": value for key, value in numbers.items()})


class _Thread(threading.Thread):
    """The thread of one tracker."""

    def __init__(self, tracker: str, config: Run, folder: pathlib.Path, past: Sequence[_Entry]) -> None:
        super().__init__(name=f"tracking {tracker}", daemon=True)  # a hanging tracker must not keep the process alive
        self.tracker, self.config, self.folder, self.past = tracker, config, folder, past
        self.queue: queue.Queue[_Entry | None] = queue.Queue(BEHIND)
        self.off = False
        self.start()

    def put(self, entry: _Entry | None) -> None:
        """Enqueue a row, or None at the end.  Never blocks."""
        if self.off:
            return
        try:
            self.queue.put_nowait(entry)
        except queue.Full:
            self._leave_off(f"it is {BEHIND} rows behind")

    def run(self) -> None:
        try:
            self._work()
        except (Exception, SystemExit) as error:  # some libraries exit instead of raising
            said = one_line(error)
            self._leave_off(f"{type(error).__name__}: {said}" if said else type(error).__name__)

    def _work(self) -> None:
        path = self.folder / self.tracker / SENT
        path.parent.mkdir(exist_ok=True)
        told = set(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else set()
        tracker = TRACKERS[self.tracker](self.config, self.folder, not told)
        with open(path, "a", buffering=1, encoding="utf-8") as file:
            for entry in itertools.chain(self.past, iter(self.queue.get, None)):
                if self.off:
                    return
                if entry.name not in told:
                    tracker.log(entry.values, entry.step)
                    told.add(entry.name)
                    file.write(entry.name + "\n")
        tracker.close("result" in told)

    def _leave_off(self, why: str) -> None:
        if not self.off:
            self.off = True
            print_notice(f"polyhead: tracking: {self.tracker} is off for this run ({why[:300]})")

    def leave(self) -> None:
        """Wait for the thread to finish, at most `PATIENCE` seconds."""
        if not self.off:
            self.join(PATIENCE)
            if self.is_alive():
                self._leave_off(f"it does not finish in {PATIENCE:.0f} s")
