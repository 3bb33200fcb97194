"""One proposal of a search, and the state of a study."""

import pathlib
from dataclasses import dataclass

from polyhead.scale.tune.space import Value

DONE, PRUNED, FAILED, RUNNING = "done", "pruned", "failed", "running"


@dataclass(frozen=True)
class Trial:
    """One proposal: its fields, run, state and score (for a pruned trial, the score at its last step)."""

    number: int
    state: str
    values: dict[str, Value]
    score: float | None
    folder: pathlib.Path | None
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """The state of a study.  `importance`: the share of each field, with sum 1; empty while unknown."""

    folder: pathlib.Path
    split: str
    metric: str
    trials: tuple[Trial, ...]
    best: Trial | None
    importance: dict[str, float]
