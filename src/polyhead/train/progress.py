"""Progress of a run: folder, size, time and scores; a bar on a terminal, occasional lines elsewhere."""

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
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


class Progress:
    """Reports on a run: first folder and size, then a progress bar, or lines without a terminal.

    The scores of each evaluation get a separate line.
    """

    def __init__(self, name: str, metric: str, *, start: int, steps: int, enabled: bool = True) -> None:
        self.name, self.metric, self.steps, self.enabled = name, metric, steps, wanted(enabled)
        self.values: dict[str, str] = {}
        self.scores: dict[str, str] = {}
        self.current_step = self.first_step = start
        self.start_time = self.line_time = time.monotonic()
        self.bar: _Bar | None = None

    def begin(self, folder: pathlib.Path, num_parameters: int) -> None:
        """Print the first line, and show the bar."""
        if not self.enabled:
            return
        begin = f" from step {self.first_step:,}" if self.first_step else ""
        self.line(f"{self.name}: {num_parameters:,} parameters, {self.steps:,} steps{begin}, {folder}")
        if sys.stderr.isatty():
            self.bar = _Bar(self.steps)
            self.bar.show(self.current_step, self._time_left())
        self.start_time = time.monotonic()

    def step(self) -> None:
        self._print_scores()
        self.current_step += 1
        if self.bar is not None:
            self.bar.show(self.current_step, self._time_left())

    def trained(self, row: dict[str, Any]) -> None:
        """Show a training row."""
        self.values["loss"] = f"{row['loss']:.4f}"
        self.values[self.metric] = f"{row[self.metric]:.3f}"
        if "tokens_per_second" in row:
            self.values["tokens/s"] = f"{row['tokens_per_second']:,.0f}"
        if self.bar is not None:
            self.bar.show(self.current_step, self._time_left(), _text(self.values))
        elif self.enabled and time.monotonic() - self.line_time > QUIET_SECONDS:
            self.line_time = time.monotonic()
            rate = f"{row['steps_per_second']:.1f} steps/s"
            step = f"step {row['step']}/{self.steps}"
            self.line(f"{self.name}: {step}, {_text(self.values)}, {rate}, {self._time_left()} left")

    def evaluated(self, row: dict[str, Any]) -> None:
        """Show an evaluation row, together with those of the other splits."""
        self.scores[row["split"]] = f"{row[self.metric]:.3f}"

    def _time_left(self) -> str:
        """The time left, from the steps so far and the time that they took with their evaluations."""
        num_steps = self.current_step - self.first_step
        if not num_steps:
            return "?"
        return duration((time.monotonic() - self.start_time) / num_steps * (self.steps - self.current_step))

    def _print_scores(self) -> None:
        if self.scores:
            self.line(f"{self.name}: step {self.current_step}: {self.metric} {_text(self.scores)}")
            self.scores = {}

    def line(self, text: str) -> None:
        """Print one line on standard error, above the bar."""
        if self.enabled:
            print_notice(text)

    def close(self) -> None:
        self._print_scores()
        if self.bar is not None:
            self.bar.close()


def _text(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


class _Bar:
    """A line on standard error drawn by rich, cut to the terminal's width; printed lines appear above it."""

    def __init__(self, steps: int, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, RenderableColumn, TextColumn
        from rich.table import Column
        from rich.text import Text

        self.text = Text(no_wrap=True, overflow="ellipsis")
        if console is None:
            console = Console(stderr=True)
        columns: list[Any] = []
        if console.width >= WIDE:
            columns.append(BarColumn(24))
        columns.append(MofNCompleteColumn(table_column=Column(no_wrap=True)))
        columns.append(TextColumn("{task.fields[left]} left", markup=False))
        columns.append(RenderableColumn(self.text))
        self.rich = Progress(*columns, console=console, refresh_per_second=4, redirect_stdout=False)
        self.task = self.rich.add_task("", total=steps, left="?")
        self.rich.start()

    def show(self, step: int, left: str, text: str | None = None) -> None:
        if text is not None:
            self.text.plain = text
        self.rich.update(self.task, completed=step, left=left)

    def close(self) -> None:
        self.rich.stop()
