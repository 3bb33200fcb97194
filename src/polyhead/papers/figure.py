"""A figure or table of a paper as one value.

The file of a figure has its runs, its claims and its drawing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from polyhead.config import Run
from polyhead.papers.outcome import FigureOutcome
from polyhead.papers.study import Paper

Runs = Callable[[str], tuple[Run, ...]]


@dataclass(frozen=True)
class Figure:
    """A figure or table.  `runs`: maps a scale to the runs, or None for a figure without training.

    `draw`: called with the study of the finished runs; for a figure without training with the scale.
    `minutes`: core minutes of all runs at the small scale, one thread each, on a busy machine (docs/results).
    `gpu`: GPU minutes of one run at paper scale, by the paper.  `short`: whether the scale `short` exists.
    """

    title: str
    paper: Paper
    draw: Callable[..., FigureOutcome]
    runs: Runs | None = None
    minutes: float | None = None
    gpu: str = ""
    short: bool = False
