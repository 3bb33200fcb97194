"""Trackers beside metrics.jsonl: TensorBoard and Weights & Biases, as callbacks for the rows of a run."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from polyhead import config as configs
from polyhead.config import Run
from polyhead.spec.optional import is_installed
from polyhead.spec.shapes import one_of
from polyhead.spec.values import one_line
from polyhead.train.messages import print_notice


def numbers_by_name(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row under the names of the tracker, such as iid/r2."""
    prefix = row.get("split", "training")
    return {f"{prefix}/{key}": x for key, x in row.items() if isinstance(x, (int, float)) and key != "step"}


class TensorBoard:
    """Event files in RUN/tensorboard.  Rows after the resumed step are replaced."""

    def __init__(self, config: Run, folder: pathlib.Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self.close = self.writer.close

    def __call__(self, row: dict[str, Any]) -> None:
        for name, value in numbers_by_name(row).items():
            self.writer.add_scalar(name, value, row["step"])


class WeightsAndBiases:
    """A run of a Weights & Biases project; files in RUN/wandb.  WANDB_* variables such as WANDB_MODE=offline work."""

    def __init__(self, config: Run, folder: pathlib.Path, step: int) -> None:
        import wandb

        # With the digest as its id, a resumed run goes on in the same record, wherever its folder is now.
        names = {"id": configs.digest(config), "name": config.name, "dir": str(folder)}
        project, about = os.environ.get("WANDB_PROJECT", "polyhead"), dataclasses.replace(config, folder=None)
        self.run = wandb.init(project=project, config=configs.to_dict(about), resume="allow", **names)
        self.run.define_metric("*", step_metric="step")  # its own step counter rejects a repeated step
        self.close = self.run.finish

    def __call__(self, row: dict[str, Any]) -> None:
        self.run.log({"step": row["step"], **numbers_by_name(row)})


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check(names: Sequence[str]) -> None:
    """Raise a ValueError for an unknown or missing tracker; nothing is imported."""
    for name in names:
        one_of("tracking", "tracker", name, TRACKERS)
        if not is_installed(name):
            package = {"tensorboard": "'polyhead[track]'"}.get(name, name)
            raise ValueError(f"tracking: {name} is not installed: pip install {package}, or leave it out of track")


class Trackers:
    """The trackers of a run that begins or resumes after `step`; one that fails is left out from then on."""

    def __init__(self, config: Run, folder: pathlib.Path, step: int) -> None:
        self.trackers: dict[str, Any] = {}
        for name in dict.fromkeys(config.track):
            with self._off_if_it_fails(name):
                self.trackers[name] = TRACKERS[name](config, folder, step)

    def add(self, row: dict[str, Any]) -> None:
        for name, tracker in list(self.trackers.items()):
            with self._off_if_it_fails(name):
                tracker(row)

    def close(self) -> None:
        for name, tracker in list(self.trackers.items()):
            with self._off_if_it_fails(name):
                tracker.close()

    @contextlib.contextmanager
    def _off_if_it_fails(self, name: str) -> Iterator[None]:
        # Whatever a tracker raises, metrics.jsonl has the rows: a lost network must not end hours of training.
        try:
            yield
        except Exception as error:
            self.trackers.pop(name, None)
            print_notice(f"polyhead: tracking: {name} is off for this run ({one_line(error)[:300]})")
