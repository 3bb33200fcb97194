"""The demo's live display: scores on known and unseen data on one scale, with floors as marks."""

import math
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polyhead.scale.sweep.job import Job
from polyhead.scale.sweep.screen import SweepScreen
from polyhead.train.store.state import State

WIDE = 50
"""Characters of the scale from 0 to 1."""


class Board(SweepScreen):
    """Shows scores on known and unseen data on one scale, with floors as marks."""

    def __init__(
        self, jobs: Sequence[Job], at_once: int, *, enabled: bool, unseen: str, marks: Mapping[str, float]
    ) -> None:
        super().__init__(jobs, at_once, enabled=enabled)
        self.unseen, self.marks = unseen, {n: x for n, x in marks.items() if 0 <= x <= 1}
        self.display = Live(get_renderable=self.drawn, console=self.console, refresh_per_second=2)

    def __enter__(self) -> "Board":
        for job in self.jobs:
            if job.state == State.DONE:
                self.line(f"{job.label}: already done")
        if self.live:
            self.display.start()
        else:
            self.line("floors: " + ", ".join(f"{name} {value:.2f}" for name, value in self.marks.items()))
        return self

    def __exit__(self, *raised: object) -> None:
        if self.live:
            self.display.stop()

    def update(self) -> None:
        if not self.live:
            super().update()

    def told(self, job: Job) -> str:
        """The scores as text, for output without a terminal."""
        metric = job.config.task.metric
        return job.text().replace(f"iid {metric}", "known").replace(f"{self.unseen} {metric}", "unseen")

    def drawn(self) -> Group:
        """One line per run: step, known and unseen scores, and the scale; then the legend of the marks."""
        table = Table.grid(padding=(0, 2))
        for job in self.jobs:
            known, unseen = (self._score(job, split) for split in ("iid", self.unseen))
            step = job.state if job.state in (State.DONE, State.WAITING) else f"{job.step:,}/{job.config.train.steps:,}"
            texts = [f"{word} {'–' if x is None else f'{x:.2f}'}" for word, x in (("known", known), ("unseen", unseen))]
            table.add_row(job.label, step, *texts, self.scale(known, unseen))
        named = "   ".join(f"{name} {value:.2f}" for name, value in self.marks.items())
        return Group(table, Text(f"○ known   ● unseen   │ {named}", style="dim"), Text(self.summary(), style="dim"))

    def _score(self, job: Job, split: str) -> float | None:
        text = job.shown.get(f"{split} {job.config.task.metric}")
        return None if text is None else float(text)

    def scale(self, known: float | None, unseen: float | None) -> str:
        """The scale from 0 to 1 as characters."""
        line = ["·"] * WIDE
        for value, mark in (*((x, "│") for x in self.marks.values()), (known, "○"), (unseen, "●")):
            if value is not None and not math.isnan(value):
                line[round(min(max(value, 0.0), 1.0) * (WIDE - 1))] = mark
        return "".join(line)
