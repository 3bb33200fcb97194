"""Checks before a run starts: do model, task and machine fit together?"""

import json
from dataclasses import fields
from typing import Any

from torch import Tensor

from polyhead import config as configs
from polyhead.config import Run
from polyhead.extensions import foreign
from polyhead.spec.shapes import one_of
from polyhead.tasks.base import Batch, check_not_empty
from polyhead.train import tracking


def check(config: Run, devices: int = 1) -> None:
    """Raise a ValueError for errors that would otherwise appear later in the run."""
    num_parts, batch_size = devices * config.train.accumulate, config.train.batch_size
    if batch_size % num_parts:
        raise ValueError(
            f"train: batch_size must be divisible by {num_parts} ({devices} devices x accumulate "
            f"{config.train.accumulate}) but is {batch_size}"
        )
    tracking.check(config.track)
    for split in config.train.evaluate:
        one_of(type(config.task).__name__, "split", split, config.task.splits)
    encoder = None
    if isinstance(config.model, configs.TransformerConfig):
        encoder = config.model.encoder
        if config.task.autoregressive and not config.model.causal:
            task = type(config.task).__name__
            raise ValueError(f"train: the inputs of {task} hold its targets, so the model must have causal=True")
    inputs, outputs = config.task.ends
    _check_end("inputs", inputs, config.model.inputs)
    _check_end("outputs", outputs, config.model.outputs)
    _check_end("source", config.task.source, getattr(encoder, "inputs", None))
    _check_lengths("model", config.model, config.task.length)
    _check_lengths("model.encoder", encoder, config.task.source_length)


def _check_end(name: str, of_task: Any, of_model: Any) -> None:
    """Raise a ValueError unless an end of the task and that of the model are of one kind and size."""
    if type(of_task) is not type(of_model) or _size(of_task) != _size(of_model):
        raise ValueError(f"train: {name}: the task has {of_task} but the model {of_model}")


def check_read_back(config: Run) -> None:
    """Raise a ValueError for a run with a user's classes that its file does not give back: nothing could load it."""
    from polyhead.tasks import KINDS

    if foreign(config, "train"):
        # By way of JSON, where a tuple comes back as a list, which a user's class may not expect.
        text = json.dumps(configs.to_dict(config))
        if configs.from_dict(json.loads(text), KINDS, where="train") != config:
            raise ValueError(f"train: the run is another one when it is read from its file: {text:.200}")


def _check_lengths(name: str, settings: configs.Model | None, length: int) -> None:
    """Raise a ValueError unless the transformer's max_length covers all tokens of the task."""
    if not isinstance(settings, configs.TransformerConfig):
        return
    if isinstance(settings.inputs, configs.Patches):
        length = settings.inputs.count
    if settings.context is not None and length > settings.context:
        raise ValueError(
            f"train: {name}.max_length must be at least {length}, the task's tokens, but is {settings.context}"
        )


def read_all(config: Run) -> None:
    """Draw a sequence of `train` and of every evaluated split, so that missing data are found now, not later."""
    for split in dict.fromkeys(("train", *config.train.evaluate)):
        check_not_empty(config.task, split)
        _check_batch(type(config.task).__name__, config.task.batch(split, 1, seed=config.seed, step=0))


def _check_batch(task: str, batch: object) -> None:
    """Raise a ValueError unless it is a Batch and all its parts are tensors with one row, as of one sequence."""
    if not isinstance(batch, Batch):
        raise ValueError(f"{task}: sample must return a Batch but returned a {type(batch).__name__}")
    if not isinstance(batch.latents, dict):
        kind = type(batch.latents).__name__
        raise ValueError(f"{task}: latents of a batch must be a dict of tensors but is a {kind}")
    # Training cuts a batch along the first axis of every array, so one without that axis would fail much later.
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "latents"}
    arrays |= {f"latents[{name!r}]": labels for name, labels in batch.latents.items()}
    for name, array in arrays.items():
        if array is None and name in ("mask", "source", "source_mask"):
            continue
        if not isinstance(array, Tensor) or array.shape[:1] != (1,):
            shape = getattr(array, "shape", type(array).__name__)
            raise ValueError(f"{task}: {name} of a batch must be a tensor (b ...) but is {shape} at b = 1")


def _size(end: configs.Input | configs.Output | None) -> int | tuple[int, ...] | None:
    """The sizes on which task and model must agree; the model chooses the patch size of an image."""
    if end is None:
        return None
    if isinstance(end, configs.Patches):
        return end.image
    if isinstance(end, (configs.Vectors, configs.Values)):
        return end.size
    return end.count
