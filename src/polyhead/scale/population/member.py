"""One run of a population: its folder, its rows, and where it stands."""

import pathlib
from typing import Any

import torch

from polyhead import config as configs
from polyhead.config import Run
from polyhead.train.store.checkpoint import read_checkpoint
from polyhead.train.store.disk import Patience
from polyhead.train.store.files import Damaged, set_aside
from polyhead.train.store.folder import RESULT, Metrics, is_past
from polyhead.train.store.saving import Rating, drop, last_whole
from polyhead.train.tracking import Rows


def recover(config: Run, folder: pathlib.Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Tensors and metadata of the last checkpoint that is whole."""

    def read(path: pathlib.Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        if path.is_dir():
            raise ValueError(f"population: {path} was saved in parts; go on with: polyhead resume {folder}")
        try:
            return read_checkpoint(folder, configs.digest(config), path.name)
        except Damaged as error:
            drop(path, error)
            return None

    return last_whole(config.name, folder, read)


class Member:
    """One run of a population: its folder, its rows, its share of the time, and where it stands."""

    def __init__(self, config: Run, folder: pathlib.Path, patience: Patience) -> None:
        self.config, self.folder, self.digest = config, folder, configs.digest(config)
        self.patience = patience
        self.tensors: dict[str, torch.Tensor] | None = None
        self.step, self.seconds, rows = 0, 0.0, 0
        self.fast: bool | None = None  # its products so far, see products.py
        self.scores: dict[str, dict[str, float]] = {}
        if (folder / RESULT).exists():  # one that can be read would not be trained
            set_aside(folder / RESULT, f"{folder / RESULT} is damaged")
        if (found := recover(config, folder)) is not None:
            self.tensors, metadata = found
            self.step, self.seconds = metadata["step"], metadata.get("seconds", 0.0)
            rows, self.fast = metadata.get("rows", 0), metadata.get("fast_products", False)
        self.saved = self.step
        self.rating = Rating(config, folder, self.digest)
        self.metrics = Rows(config, Metrics(folder, self._is_past, patience, rows))

    def _is_past(self, row: dict[str, Any]) -> bool:
        return is_past(row, self.step, self.config.train.steps)

    def add(self, row: dict[str, Any]) -> None:
        self.step = row["step"]  # what is past by now counts as rows of the next checkpoint
        self.metrics.add({**row, "seconds": self.seconds})
