"""Progress of a run: a bar on a terminal, an occasional line elsewhere."""

import os
import sys
import time
from typing import Any

QUIET_SECONDS = 30.0
"""Seconds between two lines where the output is not a terminal."""

QUIET = "POLYHEAD_QUIET"
"""The environment variable that turns progress off if it is not empty."""


def wanted(enabled: bool) -> bool:
    """Whether to show progress."""
    return enabled and not os.environ.get(QUIET)


def duration(seconds: float) -> str:
    """75 -> "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """The bar of one run: step, loss and metric in training, steps and tokens per second, time left.

    On a terminal the scores of an evaluation are a line above the bar.
    """

    def __init__(self, name: str, metric: str, *, start: int, steps: int, enabled: bool = True) -> None:
        self.name, self.metric, self.steps, self.enabled = name, metric, steps, wanted(enabled)
        self.shown: dict[str, str] = {}
        self.scores: dict[str, str] = {}
        self.spoken = time.monotonic()
        self.at = start
        self.bar = _Bar(name, start, steps) if self.enabled and sys.stderr.isatty() else None

    def step(self) -> None:
        self._tell_scores()
        self.at += 1
        if self.bar is not None:
            self.bar.show(self.at)

    def trained(self, row: dict[str, Any]) -> None:
        """A row of training."""
        self.shown["loss"] = f"{row['loss']:.4f}"
        self.shown[self.metric] = f"{row[self.metric]:.3f}"
        if "tokens_per_second" in row:
            self.shown["tokens/s"] = f"{row['tokens_per_second']:,.0f}"
        if "share_of_peak" in row:
            self.shown["of peak"] = f"{row['share_of_peak']:.0%}"
        if self.bar is not None:
            self.bar.show(self.at, self._text(self.shown))
        elif self.enabled and time.monotonic() - self.spoken > QUIET_SECONDS:
            self._say(row)

    def evaluated(self, row: dict[str, Any]) -> None:
        """A row of evaluation."""
        scores = self.shown if self.bar is None else self.scores
        scores[row["split"]] = f"{row[self.metric]:.3f}"

    def _text(self, values: dict[str, str]) -> str:
        return ", ".join(f"{name} {value}" for name, value in values.items())

    def _tell_scores(self) -> None:
        if self.scores:
            self.line(f"{self.name}: step {self.at}: {self.metric} {self._text(self.scores)}")
            self.scores = {}

    def _say(self, row: dict[str, Any]) -> None:
        self.spoken = time.monotonic()
        rate = row["steps_per_second"]
        left = duration((self.steps - row["step"]) / rate) if rate else "?"
        shown = self._text(self.shown)
        self.line(f"{self.name}: step {row['step']}/{self.steps}, {shown}, {rate:.1f} steps/s, {left} left")

    def line(self, text: str) -> None:
        """One line on standard error, above the bar."""
        if self.enabled:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._tell_scores()
        if self.bar is not None:
            self.bar.close()


class _Bar:
    """A bar of rich on standard error; lines that are printed there meanwhile appear above it."""

    def __init__(self, name: str, start: int, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        name_of, text = (TextColumn("{task." + field + "}", markup=False) for field in ("description", "fields[text]"))
        columns = (name_of, BarColumn(24), MofNCompleteColumn(), text, TimeRemainingColumn(compact=True))
        console = Console(stderr=True)
        self.rich = Progress(*columns, console=console, refresh_per_second=4, redirect_stdout=False)
        self.task = self.rich.add_task(name, completed=start, total=steps, text="")
        self.rich.start()

    def show(self, step: int, text: str | None = None) -> None:
        if text is not None:
            self.rich.update(self.task, text=text)
        self.rich.update(self.task, completed=step)

    def close(self) -> None:
        self.rich.stop()
