"""`polyhead demo`: a race on a relational game, then fuzzy logic at the paper's setting; one report on both."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polyhead.cli_runs import failed
from polyhead.train.live import DONE, WAITING, Screen

if TYPE_CHECKING:
    from polyhead.config import Run
    from polyhead.train.sweep import Job

START, SCORING = 6.0, 1.1
"""Seconds until a worker trains; what scores take on top of the steps."""

WIDE = 50
"""Characters of the scale from 0 to 1."""

RACE = """\
1 of 2, about {minutes}: is a shape between two of its kind?  Training shows pentominoes, the unseen shapes are
hexominoes.  Softmax heads mix what they see.  Dual attention has heads that compare, too.  CoRelNet only compares."""
FUZZY = """\
2 of 2, about {minutes}: functions made of two terms, at the network and setting of the HYLA paper.  70 % of the
combinations of known terms are held out.  Watch known and unseen combinations: do both go on rising?"""


@dataclass(frozen=True)
class Demo:
    """Train dual attention, HYLA and softmax heads on two tasks, watch what they do with what is new, write the report.

    Takes about ten minutes on two cores.  Interrupted, the same command goes on where it stopped.

    >>> polyhead demo
    >>> polyhead demo --seed 1 --folder runs/second --workers 1
    """

    folder: Path = Path("runs/demo")
    """Where the runs and report.html go."""
    seed: int = 0
    """Added to the seeds of the runs."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    deterministic: bool = False
    """Deterministic algorithms only."""
    workers: int | None = None
    """Runs at a time (default: one per core)."""

    def __call__(self) -> int:
        from polyhead import report
        from polyhead.recipes import demo, reseeded
        from polyhead.train import Result
        from polyhead.train.sweep import sweep

        where: Any = {"device": self.device, "deterministic": self.deterministic}
        parts = [[replace(reseeded(run, self.seed), **where) for run in made] for made in (demo.race(), demo.fuzzy())]
        waits = [minutes(part, self.workers) for part in parts]
        outcomes, folders = [], []
        for part, words, unseen, wait in zip(parts, (RACE, FUZZY), UNSEEN, waits, strict=True):
            print(f"\n{words.format(minutes=wait)}\n", file=sys.stderr, flush=True)
            board = partial(Board, unseen=unseen, marks=marks(part[0], unseen))
            outcomes += sweep(part, self.folder, workers=self.workers, screen=board)
            folders.append([o.folder for o in outcomes if isinstance(o, Result) and o.name in {r.name for r in part}])
        race, fuzzy = folders
        if race and fuzzy:
            path = report.write(fuzzy, self.folder / "report.html", title="polyhead demo", beside=race)
            for name, done in (("between, accuracy", race), ("fuzzy logic, R²", fuzzy)):
                _print(name, *report.results_table(done))
            print(f"report: {path}")
        return failed(outcomes)


UNSEEN = ("novel_hexominoes", "compositional")
"""The split of each part that shows something new."""

FLOORS = ("recall", "gaussian_process", "mix", "known_pairs", "chance", "ceiling")
"""Those that are marked while one waits."""


def minutes(runs: "Sequence[Run]", workers: int | None) -> str:
    """How long the runs take here, from steps of each model that are timed now."""
    each = {str(run.model): step_seconds(run) for run in reversed(runs)}
    free = [0.0] * max(1, workers or os.cpu_count() or 1)
    for run in runs:
        free[free.index(min(free))] += START + run.train.steps * each[str(run.model)] * SCORING
    return f"{max(free) / 60:.0f} minutes" if max(free) >= 90 else f"{max(free):.0f} seconds"


def step_seconds(run: "Run", steps: int = 4) -> float:
    """Of a training step, the quickest of a few, on one thread as a worker has it."""
    import torch

    from polyhead.models.build import build
    from polyhead.train.evaluation import answers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    network = build(run.model)
    optimiser, times = torch.optim.AdamW(network.parameters()), []
    for step in range(steps):
        began = time.perf_counter()
        batch = run.task.batch("train", run.train.batch_size, seed=0, step=step)
        run.task.loss(answers(network, run.task, batch), batch).backward()
        optimiser.step()
        times.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return min(times)


def marks(run: "Run", split: str) -> dict[str, float]:
    """Floors and ceiling on the split, by name."""
    from polyhead.report_text import floor_name

    task: Any = run.task
    found = task.floors(split)
    return {floor_name(name): found[name].mean for name in FLOORS if name in found}


def _print(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from polyhead.cli_text import table

    print()
    table(title, [dict(zip(head, row, strict=True)) for row in rows])


class Board(Screen):
    """Known and unseen side by side on one scale, the floors as marks on it."""

    def __init__(
        self, jobs: "Sequence[Job]", at_once: int, *, enabled: bool, unseen: str, marks: Mapping[str, float]
    ) -> None:
        super().__init__(jobs, at_once, enabled=enabled)
        self.unseen, self.marks = unseen, {n: x for n, x in marks.items() if 0 <= x <= 1}
        self.display = Live(get_renderable=self.drawn, console=self.console, refresh_per_second=2)

    def __enter__(self) -> "Board":
        for job in self.jobs:
            if job.state == DONE:
                self.line(f"{job.config.name}: already done")
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

    def drawn(self) -> Group:
        """A line a run: step, known, unseen, both on the scale; then what the marks are."""
        table = Table.grid(padding=(0, 2))
        for job in self.jobs:
            known, unseen = (self._score(job, split) for split in ("iid", self.unseen))
            step = job.state if job.state in (DONE, WAITING) else f"{job.step:,}/{job.config.train.steps:,}"
            texts = [f"{word} {'–' if x is None else f'{x:.2f}'}" for word, x in (("known", known), ("unseen", unseen))]
            table.add_row(job.config.name, step, *texts, self.scale(known, unseen))
        named = "   ".join(f"{name} {value:.2f}" for name, value in self.marks.items())
        return Group(table, Text(f"○ known   ● unseen   │ {named}", style="dim"), Text(self.summary(), style="dim"))

    def _score(self, job: "Job", split: str) -> float | None:
        text = job.shown.get(f"{split} {job.config.task.metric}")
        return None if text is None else float(text)

    def scale(self, known: float | None, unseen: float | None) -> str:
        """0 to 1 in characters."""
        line = ["·"] * WIDE
        for value, mark in (*((x, "│") for x in self.marks.values()), (known, "○"), (unseen, "●")):
            if value is not None:
                line[round(min(max(value, 0.0), 1.0) * (WIDE - 1))] = mark
        return "".join(line)
