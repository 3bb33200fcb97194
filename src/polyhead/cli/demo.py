"""`polyhead demo`: a race on a relational game, then fuzzy logic with the paper's settings; one report on both."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhead.cli.output import emit
from polyhead.cli.parse import Deterministic, Device
from polyhead.cli.train import failed
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from polyhead.config import Run

START, SCORING = 6.0, 1.1
"""Seconds until a worker trains; the time for evaluation as a share of the time for steps."""

PAGE = "report.html"

RACE = """\
1 of 2, about {minutes}: is a shape between two of its kind?  Training shows pentominoes, the unseen shapes are
hexominoes.  Softmax heads mix values.  Dual attention also has heads that compare.  CoRelNet only compares."""
FUZZY = """\
2 of 2, about {minutes}: functions made of two terms, with the network and settings of the HYLA paper, {steps:,} of
its 50,000 steps.  70 % of the combinations of known terms are held out.  Watch known and unseen combinations: do both
keep rising?"""


@dataclass(frozen=True)
class Demo:
    """Train dual attention, HYLA and softmax heads on two tasks, watch their scores on unseen data, write a report.

    It first estimates the time on this machine.  After an interruption, run it again to resume.

    >>> polyhead demo
    >>> polyhead demo --steps 50000
    >>> polyhead demo --seed 1 --folder runs/second --workers 1
    """

    folder: Path = Path("runs/demo")
    """The folder for the runs and report.html."""
    seed: int = 0
    """Added to the seeds of the runs."""
    device: Device = "auto"
    deterministic: Deterministic = False
    workers: int | None = None
    """Runs at a time (default: one per core)."""
    steps: int | None = None
    """Training steps of fuzzy logic (default: 12,500, or 6,500 on a processor without AVX-512; the paper: 50,000)."""

    def __call__(self) -> int:
        for name in ("workers", "steps"):
            if (count := getattr(self, name)) is not None:
                check_number("demo", name, count, 1)
        from polyhead.pages import report
        from polyhead.papers import demo
        from polyhead.papers.recipes import reseeded
        from polyhead.scale.sweep.board import Board
        from polyhead.scale.sweep.jobs import sweep
        from polyhead.train import Result
        from polyhead.train.device import pick_device
        from polyhead.train.store.files import check_place

        check_place("demo", self.folder / PAGE)
        made = demo.race(), demo.fuzzy(self.steps or demo.steps_on(pick_device(self.device)))
        placed = partial(replace, device=self.device, deterministic=self.deterministic)
        parts = [[placed(reseeded(run, self.seed)) for run in part] for part in made]
        waits = [minutes(part, self.workers) for part in parts]
        outcomes, folders = [], []
        for part, words, unseen, wait in zip(parts, (RACE, FUZZY), UNSEEN, waits, strict=True):
            print(f"\n{words.format(minutes=wait, steps=part[0].train.steps)}\n", file=sys.stderr, flush=True)
            board = partial(Board, unseen=unseen, marks=marks(part[0], unseen))
            outcomes += sweep(part, self.folder, workers=self.workers, screen=board)
            folders.append([o.folder for o in outcomes if isinstance(o, Result) and o.name in {r.name for r in part}])
        race, fuzzy = folders
        if race and fuzzy:
            path = report.write(fuzzy, self.folder / PAGE, title="polyhead demo", beside=race, trained=demo.full())
            done = {"between, a game: accuracy": race, "fuzzy logic: R²": fuzzy}
            scored = {name: report.results_table(part) for name, part in done.items()}
            emit(lambda: {"report": path, **scored}, lambda: _print(scored, report.title(fuzzy), path))
        return failed(outcomes)


UNSEEN = ("novel_hexominoes", "compositional")
"""The split with unseen data, for each part."""
NAMES = {
    "iid": "known",
    "compositional": "unseen combinations",
    "novel_hexominoes": "unseen shapes: hexominoes",
    "novel_stripes": "unseen shapes: stripes",
}
"""Labels of splits, for each part."""


def minutes(runs: "Sequence[Run]", workers: int | None) -> str:
    """The estimated minutes of the runs on this machine, from timed steps of each model."""
    each = {str(run.model): step_seconds(run) for run in reversed(runs)}
    free = [0.0] * max(1, workers or os.cpu_count() or 1)
    for run in runs:
        free[free.index(min(free))] += START + run.train.steps * each[str(run.model)] * SCORING
    return f"{max(free) / 60:.0f} minutes" if max(free) >= 90 else f"{max(free):.0f} seconds"


def step_seconds(run: "Run", steps: int = 4) -> float:
    """Seconds of a training step, the fastest of a few, on one thread as in a worker."""
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
    task: Any = run.task
    found, words = task.floors(split), task.words.floors
    return {words[name].label: found[name].mean for name in words if words[name].drawn or name == "chance"}


def _print(tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]], title: str, path: Path) -> None:
    from polyhead.cli.text import table

    for name, (head, rows) in tables.items():
        print()
        named = [NAMES.get(split, split) for split in head]
        table(name, [dict(zip(named, row, strict=True)) for row in rows])
    print(
        f'\n{title}.\nThe same networks trained in full: polyhead list models, ph.load("fuzzy-hyla").\nreport: {path}'
    )
