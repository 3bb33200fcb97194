"""Checks before a run starts: do model, task and machine fit together?"""

import json
from dataclasses import fields

from torch import Tensor

from polyhead import config as configs
from polyhead.config import Run
from polyhead.config.extensions import check_found, foreign
from polyhead.models.generate.tokens import reach
from polyhead.spec.shapes import one_of
from polyhead.train import tracking
from polyhead.train.device import pick_device
from polyhead.train.evaluation import enough


def check(config: Run, devices: int = 1) -> None:
    """Raise a ValueError for errors that would otherwise appear later in the run."""
    pick_device(config.device)
    pieces, size = devices * config.train.accumulate, config.train.batch_size
    if size % pieces:
        wanted = f"{pieces} ({devices} devices x accumulate {config.train.accumulate})"
        raise ValueError(f"train: batch_size must be divisible by {wanted} but is {size}")
    tracking.check(config.track)
    for split in config.train.evaluate:
        one_of(type(config.task).__name__, "split", split, config.task.splits)
    encoder = config.model.encoder if isinstance(config.model, configs.TransformerConfig) else None
    gives = dict(zip(("inputs", "outputs"), config.task.ends, strict=True)) | {"source": config.task.source}
    takes = {"inputs": config.model.inputs, "outputs": config.model.outputs}
    takes |= {"source": None if encoder is None else encoder.inputs}
    for what, given in gives.items():
        taken = takes[what]
        if type(given) is not type(taken) or _size(given) != _size(taken):
            verb = "is" if what == "source" else "are"
            raise ValueError(f"train: the task's {what} {verb} {given} but the model's {verb} {taken}")
    if config.task.autoregressive and isinstance(config.model, configs.TransformerConfig) and not config.model.causal:
        who = type(config.task).__name__
        raise ValueError(f"train: the inputs of {who} hold its targets, so the model needs causal=True but has False")
    _check_lengths("model", config.model, config.task.length)
    _check_lengths("model.encoder", encoder, config.task.source_length)


def check_read_back(config: Run) -> None:
    """Raise a ValueError for a run with a user's classes that its file does not give back: it could be neither resumed
    nor loaded."""
    from polyhead.tasks import KINDS

    strangers = list(foreign(config))
    for kind in strangers:
        check_found(kind, "train")
    if strangers:
        text = json.dumps(configs.to_dict(config))
        if configs.from_dict(json.loads(text), KINDS, where="train") != config:
            raise ValueError(f"train: the run is another one when it is read from its file: {text:.200}")


def _check_lengths(name: str, settings: configs.Model | None, length: int) -> None:
    """Raise a ValueError unless the transformer's max_length covers all tokens of the task."""
    if not isinstance(settings, configs.TransformerConfig):
        return
    length = settings.inputs.count if isinstance(settings.inputs, configs.Patches) else length
    if (most := reach(settings)) is not None and length > most:
        raise ValueError(f"train: {name}.max_length must be at least {length}, the task's tokens, but is {most}")


def read_all(config: Run) -> None:
    """Draw a sequence of every evaluated split, so that missing data are found now, not at the first evaluation."""
    for split in config.train.evaluate:
        enough(config.task, split, 1, 1)
        _check_batch(type(config.task).__name__, config.task.batch(split, 1, seed=config.seed, step=0))


def _check_batch(who: str, batch: object) -> None:
    """Raise a ValueError unless it is a Batch and all its parts are tensors with one row, as of one sequence."""
    if not isinstance(batch, configs.Batch):
        raise ValueError(f"{who}: sample must return a Batch but returned a {type(batch).__name__}")
    if not isinstance(batch.latents, dict):
        raise ValueError(f"{who}: latents of a batch must be a dict of tensors but is a {type(batch.latents).__name__}")
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "latents"}
    arrays |= {f"latents[{name!r}]": labels for name, labels in batch.latents.items()}
    for name, array in arrays.items():
        if array is None and name in ("mask", "source", "source_mask"):
            continue
        if not isinstance(array, Tensor) or array.shape[:1] != (1,):
            came = f"has shape {tuple(array.shape)}" if isinstance(array, Tensor) else f"is a {type(array).__name__}"
            raise ValueError(f"{who}: {name} of a batch must be a tensor (b ...) but {came} at b = 1")


def _size(end: configs.Input | configs.Output | None) -> int | tuple[int, ...] | None:
    """The sizes on which task and model must agree; the model chooses the patch size of an image."""
    if end is None or isinstance(end, configs.Patches):
        return None if end is None else end.image
    return end.size if isinstance(end, (configs.Vectors, configs.Values)) else end.count
