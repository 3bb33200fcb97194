"""One proposal of a search, and a study as it stands."""

import pathlib
from dataclasses import dataclass

from polyhead.scale.tune.space import Value

DONE, PRUNED, FAILED, RUNNING = "done", "pruned", "failed", "running"


@dataclass(frozen=True)
class Trial:
    """One proposal: its fields, its run, what became of it, and its score, of a pruned one that at its last step."""

    number: int
    state: str
    values: dict[str, Value]
    score: float | None
    folder: pathlib.Path | None
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """A study as it stands.  `importance`: of each field, shares that add up to 1; empty while it is not known."""

    folder: pathlib.Path
    split: str
    metric: str
    trials: tuple[Trial, ...]
    best: Trial | None
    importance: dict[str, float]
