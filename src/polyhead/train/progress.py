"""Progress of a run: folder, size, time and scores; a bar in a terminal or notebook, occasional lines elsewhere."""

import importlib.util
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

from polyhead.train.messages import print_notice

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.text import Text

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
        self.text = ""
        self.scores: dict[str, str] = {}
        self.current_step = self.first_step = start
        self.start_time = self.line_time = time.monotonic()
        self.bar: Bar | None = None

    def begin(self, folder: pathlib.Path, num_parameters: int, console: "Console | None" = None) -> None:
        """Print the first line, and show the bar where there is a place for one."""
        if not self.enabled:
            return
        begin = f" from step {self.first_step:,}" if self.first_step else ""
        self.line(f"{self.name}: {num_parameters:,} parameters, {self.steps:,} steps{begin}, {folder}")
        console = console or bar_console()
        if console is not None:
            self.bar, self.bar_text = make_bar(console, self.steps)
            self.bar.start()
            self._show()
        self.start_time = time.monotonic()

    def step(self) -> None:
        self._print_scores()
        self.current_step += 1
        self._show()

    def trained(self, row: dict[str, Any]) -> None:
        """Show a training row."""
        self.text = f"loss {row['loss']:.4f}, {self.metric} {row[self.metric]:.3f}"
        if "tokens_per_second" in row:
            self.text += f", tokens/s {row['tokens_per_second']:,.0f}"
        self._show()
        if self.bar is None and time.monotonic() - self.line_time > QUIET_SECONDS:
            self.line_time = time.monotonic()
            rate = f"{row['steps_per_second']:.1f} steps/s"
            step = f"step {row['step']}/{self.steps}"
            self.line(f"{self.name}: {step}, {self.text}, {rate}, {self._time_left()} left")

    def evaluated(self, row: dict[str, Any]) -> None:
        """Show an evaluation row, together with those of the other splits."""
        self.scores[row["split"]] = f"{row[self.metric]:.3f}"

    def _time_left(self) -> str:
        """The time left, from the steps so far and the time that they took with their evaluations."""
        num_steps = self.current_step - self.first_step
        if not num_steps:
            return "?"
        return duration((time.monotonic() - self.start_time) / num_steps * (self.steps - self.current_step))

    def _show(self) -> None:
        if self.bar is not None:
            self.bar_text.plain = f"{self._time_left()} left {self.text}"
            self.bar.update(self.bar.task_ids[0], completed=self.current_step)

    def _print_scores(self) -> None:
        if self.scores:
            scores = ", ".join(f"{split} {score}" for split, score in self.scores.items())
            self.line(f"{self.name}: step {self.current_step}: {self.metric} {scores}")
            self.scores = {}

    def line(self, text: str) -> None:
        """Print one line on standard error, above the bar."""
        if self.enabled:
            print_notice(text)

    def close(self) -> None:
        self._print_scores()
        if self.bar is not None:
            self.bar.stop()


def bar_console() -> "Console | None":
    """The console of a terminal, or of a notebook in which rich can draw; None elsewhere."""
    in_notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None
    if not (sys.stderr.isatty() or in_notebook):
        return None
    from rich.console import Console

    return Console(stderr=True)


def make_bar(console: "Console", steps: int) -> "tuple[Bar, Text]":
    """A line drawn by rich, and its text, which is cut to the terminal's width; printed lines appear above it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, RenderableColumn
    from rich.table import Column
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    columns: list[Any] = [MofNCompleteColumn(table_column=Column(no_wrap=True)), RenderableColumn(text)]
    if console.width >= WIDE:
        columns.insert(0, BarColumn(24))
    bar = Progress(*columns, console=console, refresh_per_second=4, redirect_stdout=False)
    bar.add_task("", total=steps)
    return bar, text
