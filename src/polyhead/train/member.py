"""One run of a training loop: its folder, rows, checkpoints, share of the time, and step."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyhead import config as configs
from polyhead.config import Run
from polyhead.train.network import RECENT
from polyhead.train.parallel import is_sharded, whole
from polyhead.train.store import checkpoint
from polyhead.train.store.bad_batch import first_bad
from polyhead.train.store.disk import DiskRetry
from polyhead.train.store.files import Damaged
from polyhead.train.store.folder import CONFIG, Metrics, Result, is_past, write_result
from polyhead.train.store.saving import READ, Rating, diverged, drop, last_whole
from polyhead.train.store.state import forget_end
from polyhead.train.tracking import Rows
from polyhead.train.world import World

Scaler = torch.amp.GradScaler


class Member:
    """One run of a training loop.  `step`: the step of its last row.  `saved`: the step of its last checkpoint."""

    def __init__(self, config: Run, folder: pathlib.Path, retry: DiskRetry, world: World | None = None) -> None:
        self.config, self.folder, self.retry, self.digest = config, folder, retry, configs.digest(config)
        self.world = world or World.alone()
        self.sharded = is_sharded(self.world, config.parallel)
        self.step = self.saved = 0
        self.seconds = 0.0
        self.fast: bool | None = None  # whether the run uses fast products, see products.py
        self.scores: dict[str, dict[str, float]] = {}
        self.metrics: Rows | None = None  # on rank 0 only

    def load(self, model: nn.Module, optimiser: torch.optim.Optimizer, scaler: Scaler | None = None) -> int:
        """Load the last undamaged checkpoint into model, optimiser and loss scale; return its step, or 0 without one.

        A damaged checkpoint is renamed.  Raises ValueError for a checkpoint of another run or version.
        """
        read = functools.partial(self._read, model=model, optimiser=optimiser)
        metadata = last_whole(self.config.name, self.folder, read, first=self.world.first)
        self.rating = Rating(self.config, self.folder, self.digest)
        if metadata is not None:
            if scaler is not None and metadata.get("scaler"):
                scaler.load_state_dict(metadata["scaler"])
            self.step = self.saved = metadata["step"]
            self.seconds, self.fast = metadata.get("seconds", 0.0), metadata.get("fast_products", False)
        self.rows = 0 if metadata is None else metadata.get("rows", 0)
        # A process may be killed after it saved the best checkpoint so far and before that had its second name.
        self.rating.step, self.rating.score = self.step, None if metadata is None else metadata.get("score")
        score, best = self.rating.at(self.step)
        if self.world.on_rank_zero(lambda: int(best)):
            self._save_whole(checkpoint.save_best, model, optimiser, self._about(self.step, score, scaler))
        self.rating.kept(self.step)
        return self.step

    def _read(self, path: pathlib.Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any] | None:
        """The metadata of a checkpoint, or None for a damaged one, which is renamed."""
        metadata, error = None, Damaged(f"checkpoint: {path} is damaged for another process")
        try:
            metadata = READ[path.suffix](path, self.digest, model, optimiser)
        except Damaged as found:
            error = found
        if not self.world.sum(torch.tensor([float(metadata is None)])):
            return metadata
        if self.world.first:
            drop(path, error)
        return None

    def begin(self) -> None:
        """Open metrics.jsonl and keep its rows up to `step`.  Raises OSError."""
        if self.world.first:
            forget_end(self.folder)
            self.metrics = Rows(self.config, Metrics(self.folder, self._is_past, self.retry, self.rows))

    def _is_past(self, row: dict[str, Any]) -> bool:
        return is_past(row, self.step, self.config.train.steps)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self.step = row["step"]  # the next checkpoint includes all rows so far
        if self.metrics is not None:
            self.metrics.add({**row, "seconds": self.seconds})

    def save(self, step: int, model: nn.Module, optimiser: torch.optim.Optimizer, scaler: Scaler | None = None) -> None:
        """Replace the checkpoint; retry while the disk fails."""
        if self.metrics is not None:
            self.rows = self.metrics.sync()  # the checkpoint counts rows, so they are written first
        score, best = self.rating.at(step)
        metadata = self._about(step, score, scaler)
        keep, retry = self.config.train.keep, self.retry
        if self.sharded:
            from polyhead.train.store.sharded import save_sharded

            save_sharded(self.folder, model, optimiser, metadata, keep=keep, retry=retry)
            if self.world.on_rank_zero(lambda: int(best)):
                self._save_whole(checkpoint.save_best, model, optimiser, metadata)
        elif self.world.first:
            checkpoint.save_checkpoint(self.folder, model, optimiser, metadata, best=best, keep=keep, retry=retry)
        self.rating.kept(step)
        self.saved = step

    def _about(self, step: int, score: float | None, scaler: Scaler | None) -> dict[str, Any]:
        scale = {} if scaler is None else scaler.state_dict()
        metadata = {"digest": self.digest, "step": step, "seconds": self.seconds, "score": score, "scaler": scale}
        return metadata | {"rows": self.rows, "fast_products": bool(self.fast)}

    def _save_whole(
        self, save: Callable[..., None], model: nn.Module, optimiser: torch.optim.Optimizer, metadata: dict[str, Any]
    ) -> None:
        """Save a sharded model as one file: rank 0 writes it, the other ranks send their parts."""
        if self.world.first:
            save(self.folder, model, optimiser, metadata, retry=self.retry)
        else:
            for _, part in checkpoint.state(model, optimiser):
                whole(part)

    def trouble(self, what: str, step: int, losses: Sequence[Tensor]) -> ValueError:
        """The error of a diverged run: advice, and the path of its first bad batch.  `losses`: of its last steps."""
        bad = first_bad(list(losses))
        first = step if bad is None else step - len(losses) + bad + 1
        known = f" of the last {RECENT:,}" if bad == 0 and len(losses) == RECENT else ""
        return ValueError(diverged(what, self.config, self.folder, step, first, self.saved, known=known))

    def finish(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        scaler: Scaler | None = None,
        *,
        parameters: int,
        environment: dict[str, Any],
    ) -> Result:
        """Write the result.  A sharded run also saves one whole checkpoint, for readers of single files."""
        result = Result(
            name=self.config.name,
            digest=self.digest,
            steps=self.saved,
            seconds=self.seconds,
            parameters=parameters,
            scores=self.scores,
            command=self.world.command(self.folder / CONFIG),
            environment=environment,
            folder=self.folder,
        )
        if self.sharded:
            save = functools.partial(checkpoint.save_checkpoint, keep=self.config.train.keep)
            self._save_whole(save, model, optimiser, self._about(result.steps, None, scaler))
        if self.metrics is not None:
            self.metrics.finish(result)
            self.retry(lambda: write_result(result))
        return result

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
