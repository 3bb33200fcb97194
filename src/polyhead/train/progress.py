"""Progress of a run: folder, size, time and scores; a bar on a terminal, occasional lines elsewhere."""

import glob
import itertools
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

from polyhead.train.messages import print_notice

if TYPE_CHECKING:
    from rich.console import Console

QUIET_SECONDS = 30.0
"""Seconds between two lines if the output is not a terminal."""

QUIET = "POLYHEAD_QUIET"
"""Progress is off if this environment variable is not empty."""

WIDE = 80
"""The least width of a terminal for a bar beside the numbers."""


def wanted(enabled: bool) -> bool:
    """Whether to show progress."""
    return enabled and not os.environ.get(QUIET)


def duration(seconds: float) -> str:
    """75 -> "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def pace(folder: pathlib.Path, name: str, parameters: int) -> float | None:
    """Seconds per step, including evaluations, of finished runs with this name and size beside `folder`; None without.

    At most ten runs are read, because there may be thousands.
    """
    from polyhead.train.store.files import Damaged
    from polyhead.train.store.folder import RESULT, read_result

    known = []
    for path in itertools.islice(folder.parent.glob(f"{glob.escape(name)}*/{RESULT}"), 10):
        try:
            result = read_result(path.parent)
        except (Damaged, OSError):
            continue
        if result is not None and (result.name, result.parameters) == (name, parameters) and result.steps:
            known.append(result.seconds / result.steps)
    return sum(known) / len(known) if known else None


class Progress:
    """Reports on a run: first folder, size and time, then a progress bar, or lines without a terminal.

    The scores of each evaluation get a separate line.
    """

    def __init__(self, name: str, metric: str, *, start: int, steps: int, enabled: bool = True) -> None:
        self.name, self.metric, self.steps, self.enabled = name, metric, steps, wanted(enabled)
        self.shown: dict[str, str] = {}
        self.scores: dict[str, str] = {}
        self.at = self.start = start
        self.began = self.spoken = time.monotonic()
        self.pace: float | None = None
        self.bar: _Bar | None = None

    def begin(self, folder: pathlib.Path, parameters: int) -> None:
        """Print the first line, and show the bar."""
        if not self.enabled:
            return
        self.pace = pace(folder, self.name, parameters)
        steps = f"{self.steps:,} steps" + (f" from step {self.start:,}" if self.start else "")
        known = "" if self.pace is None else f", about {self._left()} by finished runs"
        self.line(f"{self.name}: {parameters:,} parameters, {steps}{known}, {folder}")
        if sys.stderr.isatty():
            self.bar = _Bar(self.steps)
            self.bar.show(self.at, self._left())
        self.began = time.monotonic()

    def step(self) -> None:
        self._tell_scores()
        self.at += 1
        if self.bar is not None:
            self.bar.show(self.at, self._left())

    def trained(self, row: dict[str, Any]) -> None:
        """Show a training row."""
        self.shown["loss"] = f"{row['loss']:.4f}"
        self.shown[self.metric] = f"{row[self.metric]:.3f}"
        if "tokens_per_second" in row:
            self.shown["tokens/s"] = f"{row['tokens_per_second']:,.0f}"
        if self.bar is not None:
            self.bar.show(self.at, self._left(), self._text(self.shown))
        elif self.enabled and time.monotonic() - self.spoken > QUIET_SECONDS:
            self._say(row)

    def evaluated(self, row: dict[str, Any]) -> None:
        """Show an evaluation row."""
        self.scores[row["split"]] = f"{row[self.metric]:.3f}"

    def _left(self) -> str:
        """The time left, from the steps so far and the time between them; before the first step, from finished runs."""
        done = self.at - self.start
        each = (time.monotonic() - self.began) / done if done else self.pace
        return "?" if each is None else duration(each * (self.steps - self.at))

    def _text(self, values: dict[str, str]) -> str:
        return ", ".join(f"{name} {value}" for name, value in values.items())

    def _tell_scores(self) -> None:
        if self.scores:
            self.line(f"{self.name}: step {self.at}: {self.metric} {self._text(self.scores)}")
            self.scores = {}

    def _say(self, row: dict[str, Any]) -> None:
        self.spoken = time.monotonic()
        rate, shown = row["steps_per_second"], self._text(self.shown)
        self.line(f"{self.name}: step {row['step']}/{self.steps}, {shown}, {rate:.1f} steps/s, {self._left()} left")

    def line(self, text: str) -> None:
        """Print one line on standard error, above the bar."""
        if self.enabled:
            print_notice(text)

    def close(self) -> None:
        self._tell_scores()
        if self.bar is not None:
            self.bar.close()


class _Bar:
    """A line on standard error drawn by rich, cut to the terminal's width; printed lines appear above it."""

    def __init__(self, steps: int, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, RenderableColumn, TextColumn
        from rich.table import Column
        from rich.text import Text

        self.text = Text(no_wrap=True, overflow="ellipsis")
        console = Console(stderr=True) if console is None else console
        left = TextColumn("{task.fields[left]} left", markup=False)
        columns = (MofNCompleteColumn(table_column=Column(no_wrap=True)), left, RenderableColumn(self.text))
        bar = (BarColumn(24),) if console.width >= WIDE else ()
        self.rich = Progress(*bar, *columns, console=console, refresh_per_second=4, redirect_stdout=False)
        self.task = self.rich.add_task("", total=steps, left="?")
        self.rich.start()

    def show(self, step: int, left: str, text: str | None = None) -> None:
        if text is not None:
            self.text.plain = text
        self.rich.update(self.task, completed=step, left=left)

    def close(self) -> None:
        self.rich.stop()
