"""What a run leaves on the disk so that it can go on, and what is told when it diverges."""

import pathlib
from typing import Any

import torch
from torch import nn

from polyhead import config as configs
from polyhead.config import Run
from polyhead.train.checkpoint import load_optimiser, load_weights, read_checkpoint, save_checkpoint
from polyhead.train.folder import CHECKPOINT


class Saver:
    """Saves and restores model, optimiser and loss scale of one run.  `saved`: the step of the last checkpoint."""

    def __init__(
        self,
        config: Run,
        folder: pathlib.Path,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.config, self.folder = config, folder
        self.model, self.optimiser, self.scaler = model, optimiser, scaler
        self.saved = 0

    def load(self) -> tuple[int, float]:
        """Fill model and optimiser from the folder's checkpoint; steps done and seconds they took, 0 without one."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return 0, 0.0
        tensors, metadata = read_checkpoint(self.folder, configs.digest(self.config))
        load_weights(self.model, tensors, path)
        load_optimiser(self.model, self.optimiser, tensors, path)
        if metadata["scaler"]:
            self.scaler.load_state_dict(metadata["scaler"])
        self.saved = metadata["step"]
        return metadata["step"], metadata["seconds"]

    def save(self, step: int, seconds: float) -> None:
        """Replace the checkpoint.  Raises ValueError for parameters that are not finite, OSError on a full disk."""
        whole = torch.stack([p.detach().isfinite().all() for p in self.model.parameters()]).all().item()
        self.demand(whole, f"parameters of {self.config.name} are not finite", step)
        metadata: dict[str, Any] = {"digest": configs.digest(self.config), "step": step, "seconds": seconds}
        save_checkpoint(self.folder, self.model, self.optimiser, {**metadata, "scaler": self.scaler.state_dict()})
        self.saved = step

    def demand(self, fine: object, what: str, step: int) -> None:
        """Stop training, with advice, unless `fine`."""
        if not fine:
            raise ValueError(diverged(what, step, self.saved))


def diverged(what: str, step: int, saved: int) -> str:
    """The advice of a run whose loss or parameters (`what`) are not finite."""
    kept = f"the checkpoint of step {saved} is kept" if saved else "there is no checkpoint yet"
    return f"train: {what} at step {step}; {kept}; lower train.lr or set train.clip"
