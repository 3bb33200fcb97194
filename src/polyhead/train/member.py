"""One run of a training loop: its folder, rows, checkpoints, share of the time, and step."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyhead import config as configs
from polyhead.config import Run
from polyhead.train.network import RECENT, State, initial
from polyhead.train.parallel import is_sharded, whole
from polyhead.train.store import checkpoint
from polyhead.train.store.bad_batch import first_bad, write_batch
from polyhead.train.store.disk import DiskRetry
from polyhead.train.store.files import Damaged, forget
from polyhead.train.store.folder import BAD_BATCH, CONFIG, Metrics, Result, is_past, write_result
from polyhead.train.store.saving import READ, BestCheckpoint, drop, last_whole
from polyhead.train.store.state import ENDED
from polyhead.train.tracking import TrackedMetrics
from polyhead.train.world import World


class Member:
    """One run of a training loop.  `step`: the step of its last row.  `saved`: the step of its last checkpoint."""

    def __init__(self, config: Run, folder: pathlib.Path, retry: DiskRetry, world: World | None = None) -> None:
        self.config, self.folder, self.retry, self.digest = config, folder, retry, configs.digest(config)
        self.world = world or World.alone()
        self.sharded = is_sharded(self.world, config.parallel)
        self.step = self.saved = self.rows = 0
        self.seconds = 0.0
        self.fast: bool | None = None  # whether the run uses fast products, see products.py
        self.scores: dict[str, dict[str, float]] = {}
        self.metrics: TrackedMetrics | None = None  # on rank 0 only

    def load(self, state: State) -> int:
        """Load the last undamaged checkpoint into `state`; return its step, or 0 without one.

        A damaged checkpoint is renamed.  Raises ValueError for a checkpoint of another run or version.
        """
        model, optimiser, scaler = state
        read = functools.partial(self._read, model=model, optimiser=optimiser)
        metadata = last_whole(self.config.name, self.folder, read, first=self.world.first)
        self.rating = BestCheckpoint(self.config, self.folder, self.digest)
        if metadata is not None:
            if scaler is not None and metadata.get("scaler"):
                scaler.load_state_dict(metadata["scaler"])
            self.step = self.saved = metadata["step"]
            self.seconds, self.rows = metadata.get("seconds", 0.0), metadata.get("rows", 0)
            self.fast = metadata.get("fast_products", False)
            self.rating.step, self.rating.score = self.step, metadata.get("score")
        # A process may be killed after it saved the best checkpoint so far and before that had its second name.
        score, best = self.rating.at(self.step)
        if self.world.on_rank_zero(lambda: int(best)):
            self._save_whole(checkpoint.save_best, state, self._about(self.step, score, scaler))
        self.rating.kept(self.step)
        return self.step

    def _read(self, path: pathlib.Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any] | None:
        """The metadata of a checkpoint; None for a damaged one, which is renamed: the state is then the initial one."""
        metadata, error = None, Damaged(f"checkpoint: {path} is damaged for another process")
        try:
            metadata = READ[path.suffix](path, self.digest, model, optimiser)
        except Damaged as found:
            error = found
        if not self.world.sum(torch.tensor([float(metadata is None)])):
            return metadata
        if self.world.first:
            drop(path, error)
        # Some pieces of a sharded checkpoint may be loaded, and another process may have read this one without error.
        first = {f"model/{name}": value for name, value in initial(self.config).state_dict().items()}
        checkpoint.load_weights(model, first, self.folder)
        optimiser.state.clear()
        return None

    def begin(self) -> None:
        """Open metrics.jsonl and keep its rows up to `step`.  Raises OSError."""
        if self.world.first:
            forget(self.folder / ENDED)  # why the last process ended
            self.metrics = TrackedMetrics(self.config, Metrics(self.folder, self._is_past, self.retry, self.rows))

    def _is_past(self, row: dict[str, Any]) -> bool:
        return is_past(row, self.step, self.config.train.steps)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self.step = row["step"]  # the next checkpoint includes all rows so far
        if self.metrics is not None:
            self.metrics.add({**row, "seconds": self.seconds})

    def save(self, step: int, state: State) -> None:
        """Replace the checkpoint; retry while the disk fails."""
        model, optimiser, scaler = state
        if self.metrics is not None:
            self.rows = self.metrics.sync()  # the checkpoint counts rows, so they are written first
        score, best = self.rating.at(step)
        metadata = self._about(step, score, scaler)
        keep, retry = self.config.train.keep, self.retry
        if self.sharded:
            from polyhead.train.store.sharded import save_sharded

            save_sharded(self.folder, model, optimiser, metadata, keep=keep, retry=retry)
            if self.world.on_rank_zero(lambda: int(best)):
                self._save_whole(checkpoint.save_best, state, metadata)
        elif self.world.first:
            checkpoint.save_checkpoint(self.folder, model, optimiser, metadata, best=best, keep=keep, retry=retry)
        self.rating.kept(step)
        self.saved = step

    def _about(self, step: int, score: float | None, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
        scale = {} if scaler is None else scaler.state_dict()
        metadata = {"digest": self.digest, "step": step, "seconds": self.seconds, "score": score, "scaler": scale}
        return metadata | {"rows": self.rows, "fast_products": bool(self.fast)}

    def _save_whole(self, save: Callable[..., None], state: State, metadata: dict[str, Any]) -> None:
        """Save a sharded model as one file: rank 0 writes it, the other ranks send their parts."""
        model, optimiser, _ = state
        if self.world.first:
            save(self.folder, model, optimiser, metadata, retry=self.retry)
        else:
            for _, part in checkpoint.state(model, optimiser):
                whole(part)

    def trouble(self, what: str, step: int, losses: Sequence[Tensor], device: torch.device) -> ValueError:
        """The error of a run whose loss or parameters (`what`) are not finite: advice, and the path of its first bad
        batch, which is saved.  `losses`: of its last steps.  `device`: that of training; another draws other numbers.
        """
        config, path = self.config, self.folder / BAD_BATCH
        bad = first_bad(list(losses))
        first = step if bad is None else step - len(losses) + bad + 1
        known = f" of the last {RECENT:,}" if bad == 0 and len(losses) == RECENT else ""
        about = {"digest": self.digest, "split": "train", "seed": config.seed, "step": first, "seen": step}
        try:
            size, seed = config.train.batch_size, config.seed
            batch = config.task.batch("train", size, seed=seed, step=first - 1, device=device)
            write_batch(path, batch, {**about, "what": what})
            where = f"is in {path}"
        except OSError as error:  # not fatal: the batch can be drawn again
            where = f"could not be saved ({error.strerror})"
        kept = f"the checkpoint of step {self.saved} is kept" if self.saved else "there is no checkpoint yet"
        advice = f"train: {what} at step {step}; {kept}; lower train.lr or set train.clip"
        return ValueError(f"{advice}; the batch of step {first}, the first bad one{known}, {where}")

    def finish(self, state: State, *, parameters: int, environment: dict[str, Any]) -> Result:
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
            self._save_whole(save, state, self._about(result.steps, None, state[2]))
        if self.metrics is not None:
            self.metrics.finish(result)
            self.retry(lambda: write_result(result))
        return result

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
