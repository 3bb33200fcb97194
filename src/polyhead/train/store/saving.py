"""The checkpoint from which a run resumes, and the best checkpoint."""

import contextlib
import math
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from polyhead.config import Run, Train
from polyhead.train.messages import print_notice
from polyhead.train.store import checkpoint
from polyhead.train.store.checkpoint import candidates, read_metadata
from polyhead.train.store.files import Damaged, forget, link, set_aside
from polyhead.train.store.folder import BEST, CHECKPOINT

T = TypeVar("T")


def _restore_sharded(*what: Any) -> dict[str, Any]:
    from polyhead.train.store.sharded import restore_sharded  # the import can take a second

    return restore_sharded(*what)


READ: dict[str, Callable[..., dict[str, Any]]] = {".safetensors": checkpoint.restore, ".sharded": _restore_sharded}
"""Readers of checkpoints by file suffix: (path, digest, model, optimiser) -> metadata.  They raise Damaged."""


def last_whole(
    name: str, folder: pathlib.Path, read: Callable[[pathlib.Path], T | None], first: bool = True
) -> T | None:
    """The result of `read` for the last undamaged checkpoint; `read` returns None for a damaged checkpoint.

    That checkpoint becomes the newest.  `first`: whether this process changes files and prints.
    """
    found = candidates(folder)
    for path in found:
        if (seen := read(path)) is None:
            continue
        older = path.suffix == ".safetensors" and path.name != CHECKPOINT
        if first and older:
            link(path, folder / CHECKPOINT)
        if first and (older or path != found[0]):
            print_notice(f"{name}: resuming from {path.name}")
        return seen
    if first and found:
        print_notice(f"{name}: no checkpoint is left, so it starts at step 0; the result will be the same")
    return None


def drop(path: pathlib.Path, error: Damaged) -> None:
    """Rename a damaged checkpoint, and the best one if it is the same file."""
    best = path.with_name(BEST)
    if best != path and best.exists() and best.samefile(path):
        forget(best)
    set_aside(path, error)


def selection_split(train: Train) -> str:
    """The split whose main metric selects models: validation, else the first evaluated split; "" without any."""
    return "validation" if "validation" in train.evaluate else next(iter(train.evaluate), "")


class BestCheckpoint:
    """Tracks the best checkpoint: by the main metric on the selection split."""

    def __init__(self, config: Run, folder: pathlib.Path, digest: str) -> None:
        self.task, self.split = config.task, selection_split(config.train)
        self.step = 0
        self.score: float | None = None
        self.best: float | None = None
        path = folder / BEST
        with contextlib.suppress(ValueError):  # a damaged checkpoint does not count
            metadata = read_metadata(path) if path.exists() else {}
            if metadata.get("digest") == digest:
                self.best = metadata.get("score")

    def evaluated(self, step: int, scores: dict[str, dict[str, float]]) -> None:
        value = scores.get(self.split, {}).get(self.task.metric)
        self.step, self.score = step, value if value is not None and math.isfinite(value) else None

    def at(self, step: int) -> tuple[float | None, bool]:
        """The score of step `step` if it was evaluated, and whether it is the best so far."""
        score = self.score if self.step == step else None
        gain = self.task.gain
        return score, score is not None and (self.best is None or gain(score) > gain(self.best))

    def kept(self, step: int) -> None:
        """Record that the checkpoint of step `step` was saved."""
        score, best = self.at(step)
        self.best = score if best else self.best
