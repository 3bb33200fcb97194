"""Progress of a run in lines on standard error: folder, size, time and scores."""

import os
import pathlib
import sys
import time
from typing import Any

from polyhead.train.messages import print_notice

QUIET_SECONDS, TERMINAL_SECONDS = 30.0, 5.0
"""Seconds between two lines: in a log, and on a terminal."""

QUIET = "POLYHEAD_QUIET"
"""Progress is off if this environment variable is not empty."""


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
    """Reports on a run: first folder and size, then a line at intervals, and one for the scores of each evaluation."""

    def __init__(self, name: str, metric: str, *, start: int, steps: int, enabled: bool = True) -> None:
        self.name, self.metric, self.steps, self.enabled = name, metric, steps, wanted(enabled)
        self.scores: dict[str, str] = {}
        self.current_step = self.first_step = start
        self.start_time = self.line_time = time.monotonic()

    def begin(self, folder: pathlib.Path, num_parameters: int) -> None:
        """Print the first line."""
        begin = f" from step {self.first_step:,}" if self.first_step else ""
        self.line(f"{self.name}: {num_parameters:,} parameters, {self.steps:,} steps{begin}, {folder}")
        self.start_time = time.monotonic()

    def step(self) -> None:
        self.close()
        self.current_step += 1

    def trained(self, row: dict[str, Any]) -> None:
        """Show a training row, if the last line is some time ago."""
        interval = TERMINAL_SECONDS if self.enabled and sys.stderr.isatty() else QUIET_SECONDS
        if time.monotonic() - self.line_time > interval:
            self.line_time = time.monotonic()
            text = f"loss {row['loss']:.4f}, {self.metric} {row[self.metric]:.3f}"
            if "tokens_per_second" in row:
                text += f", tokens/s {row['tokens_per_second']:,.0f}"
            rate = f"{row['steps_per_second']:.1f} steps/s"
            step = f"step {row['step']}/{self.steps}"
            self.line(f"{self.name}: {step}, {text}, {rate}, {self._time_left()} left")

    def evaluated(self, row: dict[str, Any]) -> None:
        """Show an evaluation row, together with those of the other splits."""
        self.scores[row["split"]] = f"{row[self.metric]:.3f}"

    def _time_left(self) -> str:
        num_steps = self.current_step - self.first_step
        if not num_steps:
            return "?"
        return duration((time.monotonic() - self.start_time) / num_steps * (self.steps - self.current_step))

    def line(self, text: str) -> None:
        """Print one line on standard error."""
        if self.enabled:
            print_notice(text)

    def close(self) -> None:
        """Print the scores of the last evaluation."""
        if self.scores:
            scores = ", ".join(f"{split} {score}" for split, score in self.scores.items())
            self.line(f"{self.name}: step {self.current_step}: {self.metric} {scores}")
            self.scores = {}
