"""What a person sees while a run trains: a bar on a terminal, an occasional line elsewhere."""

import sys
import time
from typing import Any

from tqdm import tqdm

QUIET_SECONDS = 30.0
"""Between two lines of a run whose output is not a terminal."""


def duration(seconds: float) -> str:
    """75 -> "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """The bar of one run: step, loss, metric in training and on each split, steps and tokens per second, time left."""

    def __init__(self, name: str, metric: str, *, start: int, steps: int, enabled: bool = True) -> None:
        self.name, self.metric, self.steps, self.enabled = name, metric, steps, enabled
        self.shown: dict[str, str] = {}
        self.spoken = time.monotonic()
        self.bar: Any = None
        if enabled and sys.stderr.isatty():
            self.bar = tqdm(total=steps, initial=start, desc=name, unit=" steps", dynamic_ncols=True, mininterval=0.2)

    def step(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def trained(self, row: dict[str, Any]) -> None:
        """A row of training."""
        self.shown["loss"] = f"{row['loss']:.4f}"
        self.shown[self.metric] = f"{row[self.metric]:.3f}"
        if "tokens_per_second" in row:
            self.shown["tokens/s"] = f"{row['tokens_per_second']:,.0f}"
        if "share_of_peak" in row:
            self.shown["of peak"] = f"{row['share_of_peak']:.0%}"
        if self.bar is not None:
            self.bar.set_postfix(self.shown, refresh=False)
        elif self.enabled and time.monotonic() - self.spoken > QUIET_SECONDS:
            self._say(row)

    def evaluated(self, row: dict[str, Any]) -> None:
        """A row of evaluation."""
        self.shown[row["split"]] = f"{row[self.metric]:.3f}"
        if self.bar is not None:
            self.bar.set_postfix(self.shown)

    def _say(self, row: dict[str, Any]) -> None:
        self.spoken = time.monotonic()
        rate = row["steps_per_second"]
        left = duration((self.steps - row["step"]) / rate) if rate else "?"
        shown = ", ".join(f"{name} {value}" for name, value in self.shown.items())
        self.line(f"{self.name}: step {row['step']}/{self.steps}, {shown}, {rate:.1f} steps/s, {left} left")

    def line(self, text: str) -> None:
        """One line on standard error, above the bar."""
        if self.enabled:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
