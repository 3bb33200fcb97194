"""What a run leaves on the disk so that it can go on, and what is told when it diverges."""

import contextlib
import functools
import math
import pathlib
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyhead import config as configs
from polyhead.config import Run
from polyhead.train.parallel import is_sharded, own_part, whole
from polyhead.train.store import checkpoint
from polyhead.train.store.bad_batch import first_bad, write_batch
from polyhead.train.store.checkpoint import candidates, read_metadata
from polyhead.train.store.disk import Patience, tell
from polyhead.train.store.files import Damaged, forget, link, set_aside
from polyhead.train.store.folder import BAD_BATCH, BEST, CHECKPOINT
from polyhead.train.world import World

T = TypeVar("T")


def _restore_sharded(*what: Any) -> dict[str, Any]:
    from polyhead.train.store.sharded import restore_sharded  # importing it takes as long as a second

    return restore_sharded(*what)


READ: dict[str, Callable[..., dict[str, Any]]] = {".safetensors": checkpoint.restore, ".sharded": _restore_sharded}
"""How a checkpoint is read, by the end of its name: (path, digest, model, optimiser) -> metadata.  Raises Damaged."""


class Saver:
    """Saves and restores model, optimiser and loss scale of one run.  `saved`: the step of the last checkpoint."""

    def __init__(
        self,
        config: Run,
        folder: pathlib.Path,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        patience: Patience,
        *,
        world: World | None = None,
    ) -> None:
        self.config, self.folder, self.patience = config, folder, patience
        self.model, self.optimiser, self.scaler = model, optimiser, scaler
        self.digest = configs.digest(config)
        self.world = world or World.alone()
        self.sharded = is_sharded(self.world, config.parallel)
        self.saved = self.rows = 0  # rows of metrics.jsonl that the last checkpoint vouches for
        self.fast: bool | None = None  # the products of the run so far, see products.py
        self.losses: deque[Tensor] = deque(maxlen=1024)  # of the last steps, since somebody looked

    def load(self) -> tuple[int, float]:
        """Fill model and optimiser from the last checkpoint that is whole; steps done and seconds they took, 0 without.

        A damaged one is set aside.  Raises ValueError for a checkpoint of another run or version.
        """
        metadata = last_whole(self.config.name, self.folder, self._read, first=self.world.first)
        self.rating = Rating(self.config, self.folder, self.digest)
        if metadata is None:
            return 0, 0.0
        if metadata.get("scaler"):
            self.scaler.load_state_dict(metadata["scaler"])
        self.saved, self.rows = metadata["step"], metadata.get("rows", 0)
        self.fast = metadata.get("fast_products", False)
        return metadata["step"], metadata.get("seconds", 0.0)

    def _read(self, path: pathlib.Path) -> dict[str, Any] | None:
        """The metadata of a checkpoint that was read, or None of one that is damaged and was set aside."""
        metadata, error = None, Damaged(f"checkpoint: {path} is damaged for another process")
        try:
            metadata = READ[path.suffix](path, self.digest, self.model, self.optimiser)
        except Damaged as found:
            error = found
        if not self.world.sum(torch.tensor([float(metadata is None)])):
            return metadata
        if self.world.first:
            drop(path, error)
        return None

    def save(self, step: int, seconds: float) -> None:
        """Replace the checkpoint; a disk that fails is waited for.  Raises ValueError for parameters not finite."""
        bad = (~torch.stack([own_part(p).detach().isfinite().all() for p in self.model.parameters()])).sum().cpu()
        self.demand(self.world.sum(bad) == 0, f"parameters of {self.config.name} are not finite", step)
        score, best = self.rating.at(step)
        metadata: dict[str, Any] = {"digest": self.digest, "step": step, "seconds": seconds, "score": score}
        metadata |= {"scaler": self.scaler.state_dict(), "rows": self.rows, "fast_products": bool(self.fast)}
        how: dict[str, Any] = {"keep": self.config.train.keep, "patience": self.patience}
        if self.sharded:
            from polyhead.train.store.sharded import save_sharded

            save_sharded(self.folder, self.model, self.optimiser, metadata, **how)
            if self.world.lead(lambda: int(best)):
                self._save_whole(checkpoint.save_best, metadata)
        elif self.world.first:
            checkpoint.save_checkpoint(self.folder, self.model, self.optimiser, metadata, best=best, **how)
        self.rating.kept(step)
        self.saved = step

    def finish(self, step: int, seconds: float) -> None:
        """Of a sharded run, write the checkpoint that every reader knows, too: from all parts, by the first process."""
        if not self.sharded:
            return
        metadata: dict[str, Any] = {"digest": self.digest, "step": step, "seconds": seconds, "score": None}
        metadata |= {"scaler": self.scaler.state_dict(), "rows": self.rows, "fast_products": bool(self.fast)}
        self._save_whole(functools.partial(checkpoint.save_checkpoint, keep=self.config.train.keep), metadata)

    def _save_whole(self, save: Callable[..., None], metadata: dict[str, Any]) -> None:
        """As one file what lies in parts: by the first process, to which the others give theirs."""
        if self.world.first:
            save(self.folder, self.model, self.optimiser, metadata, patience=self.patience)
        else:
            for _, part in checkpoint.state(self.model, self.optimiser):
                whole(part)

    def demand(self, fine: object, what: str, step: int) -> None:
        """Stop training, with advice and the batch that did it, unless `fine`."""
        if not fine:
            losses = self.world.totals(list(self.losses))
            self.world.lead(lambda: self._diverged(what, step, losses))
        self.losses.clear()

    def _diverged(self, what: str, step: int, losses: list[Tensor]) -> int:
        bad = first_bad(losses)
        first = step if bad is None else step - len(losses) + bad + 1
        raise ValueError(diverged(what, self.config, self.folder, step, first, self.saved))


def last_whole(
    name: str, folder: pathlib.Path, read: Callable[[pathlib.Path], T | None], first: bool = True
) -> T | None:
    """What `read` makes of the last checkpoint that is whole; it gives None for one that is damaged and was dropped.

    That checkpoint is the newest from then on.  `first`: whether this process changes files and speaks.
    """
    found = candidates(folder)
    for path in found:
        if (seen := read(path)) is None:
            continue
        older = path.suffix == ".safetensors" and path.name != CHECKPOINT
        if first and older:
            link(path, folder / CHECKPOINT)
        if first and (older or path != found[0]):
            tell(f"{name}: going on from {path.name}")
        return seen
    if first and found:
        tell(f"{name}: no checkpoint is left, so it begins anew; the result will be the same")
    return None


def drop(path: pathlib.Path, error: Damaged) -> None:
    """Set a damaged checkpoint aside; the best may be the same file by another name."""
    best = path.with_name(BEST)
    if best != path and best.exists() and best.samefile(path):
        forget(best)
    set_aside(path, error)


class Rating:
    """Which checkpoint is the best: by the headline metric on the validation split, else on the first evaluated."""

    def __init__(self, config: Run, folder: pathlib.Path, digest: str) -> None:
        evaluated = config.train.evaluate
        self.split = "validation" if "validation" in evaluated else next(iter(evaluated), None)
        self.metric, self.sign = config.task.metric, 1 if config.task.better == "higher" else -1
        self.step = 0
        self.score: float | None = None
        self.best: float | None = None
        path = folder / BEST
        with contextlib.suppress(ValueError):  # one that is damaged is no best one
            metadata = read_metadata(path) if path.exists() else {}
            if metadata.get("digest") == digest:
                self.best = metadata.get("score")

    def evaluated(self, step: int, scores: dict[str, dict[str, float]]) -> None:
        value = scores.get(str(self.split), {}).get(self.metric)
        self.step, self.score = step, value if value is not None and math.isfinite(value) else None

    def at(self, step: int) -> tuple[float | None, bool]:
        """The score of step `step`, if it was evaluated, and whether there was no better one."""
        score = self.score if self.step == step else None
        return score, score is not None and (self.best is None or self.sign * (score - self.best) > 0)

    def kept(self, step: int) -> None:
        """The checkpoint of step `step` is on the disk."""
        score, best = self.at(step)
        self.best = score if best else self.best


def diverged(what: str, config: Run, folder: pathlib.Path, step: int, first: int, saved: int) -> str:
    """The advice of a run whose loss or parameters (`what`) were seen not to be finite at `step`, first at `first`.

    The batch of that first step is written into the folder.
    """
    kept = f"the checkpoint of step {saved} is kept" if saved else "there is no checkpoint yet"
    said = f"train: {what} at step {step}; {kept}; lower train.lr or set train.clip"
    about = {"digest": configs.digest(config), "split": "train", "seed": config.seed, "step": first, "seen": step}
    path = folder / BAD_BATCH
    try:
        batch = config.task.batch("train", config.train.batch_size, seed=config.seed, step=first - 1)
        write_batch(path, batch, {**about, "what": what})
    except OSError as error:  # it can be drawn again
        return f"{said}; the batch of step {first}, the first bad one, could not be saved ({error.strerror})"
    return f"{said}; the batch of step {first}, the first bad one, is in {path}"
