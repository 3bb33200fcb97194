"""Trackers beside metrics.jsonl: TensorBoard and Weights & Biases, as callbacks for the rows of a run."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from polyhead import config as configs
from polyhead.config import Run
from polyhead.spec.optional import is_installed, optional
from polyhead.spec.shapes import one_of
from polyhead.train.messages import print_notice
from polyhead.train.store.files import one_line
from polyhead.train.store.folder import Result


def numbers_by_name(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row under the names of the tracker.

    >>> numbers_by_name({"kind": "eval", "step": 500, "split": "iid", "r2": 0.5})
    {'iid/r2': 0.5}
    """
    prefix = row.get("split", "training")
    return {f"{prefix}/{key}": x for key, x in row.items() if isinstance(x, (int, float)) and key != "step"}


class TensorBoard:
    """Event files in RUN/tensorboard.  Rows after the resumed step are replaced."""

    def __init__(self, config: Run, folder: pathlib.Path, step: int) -> None:
        with optional("track tensorboard", "polyhead[track]"):
            from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def __call__(self, row: dict[str, Any]) -> None:
        for name, value in numbers_by_name(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def finish(self, result: Result) -> None:
        for split, scores in result.scores.items():
            for name, value in scores.items():
                self.writer.add_scalar(f"result/{split}/{name}", value, result.steps)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of a Weights & Biases project; files in RUN/wandb.  WANDB_* variables such as WANDB_MODE=offline work."""

    def __init__(self, config: Run, folder: pathlib.Path, step: int) -> None:
        with optional("track wandb", "wandb"):
            import wandb
        project = os.environ.get("WANDB_PROJECT", "polyhead")
        about = configs.to_dict(dataclasses.replace(config, folder=None))
        # With the digest as its id, a resumed run goes on in the same record, wherever its folder is now.
        self.run = wandb.init(
            project=project, id=configs.digest(config), name=config.name, dir=str(folder), config=about, resume="allow"
        )
        self.run.define_metric("*", step_metric="step")  # its own step counter rejects a repeated step
        self.is_done = False

    def __call__(self, row: dict[str, Any]) -> None:
        self.run.log({"step": row["step"], **numbers_by_name(row)})

    def finish(self, result: Result) -> None:
        self.run.summary.update({f"result/{split}": scores for split, scores in result.scores.items()})
        self.is_done = True

    def close(self) -> None:
        self.run.finish(exit_code=0 if self.is_done else 1)


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check(names: Sequence[str]) -> None:
    """Raise a ValueError for an unknown or missing tracker; nothing is imported."""
    for name in names:
        one_of("tracking", "tracker", name, TRACKERS)
        if not is_installed(name):
            package = "'polyhead[track]'" if name == "tensorboard" else name
            raise ValueError(f"tracking: {name} is not installed: pip install {package}, or leave it out of track")


class Trackers:
    """The trackers of a run that begins or resumes after `step`.

    A tracker that fails is left out from then on, with one line: the run goes on.
    """

    def __init__(self, config: Run, folder: pathlib.Path, step: int) -> None:
        self.trackers: dict[str, Any] = dict.fromkeys(config.track)
        self._each(lambda name: self.trackers.update({name: TRACKERS[name](config, folder, step)}))

    def add(self, row: dict[str, Any]) -> None:
        self._each(lambda name: self.trackers[name](row))

    def finish(self, result: Result) -> None:
        self._each(lambda name: self.trackers[name].finish(result))

    def close(self) -> None:
        self._each(lambda name: self.trackers[name].close())

    def _each(self, action: Callable[[str], None]) -> None:
        for name in list(self.trackers):
            # Whatever a tracker raises, metrics.jsonl has the rows: a lost network must not end hours of training.
            try:
                action(name)
            except Exception as error:
                del self.trackers[name]
                print_notice(f"polyhead: tracking: {name} is off for this run ({one_line(error)[:300]})")
