"""A figure or table of a paper: everything that is known about it, in one value.

The file that makes it holds its runs, the claims that are put to them, and how it is drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass

from polyhead.config import Run
from polyhead.papers.outcome import Outcome
from polyhead.papers.study import Paper

Runs = Callable[[str], tuple[Run, ...]]


@dataclass(frozen=True)
class Figure:
    """A figure or table.  `runs`: those of a scale, or None for a computation.

    `draw`: from the study of the finished runs, or from the scale, and the folder for its pictures.
    `minutes`: core minutes that the runs took at the small scale, one thread each, on a busy machine (docs/results).
    `gpu`: GPU minutes of one run at paper scale, by the paper.  `short`: there is a scale `short`.
    """

    title: str
    paper: Paper
    draw: Callable[..., Outcome]
    runs: Runs | None = None
    minutes: float | None = None
    gpu: str = ""
    short: bool = False
