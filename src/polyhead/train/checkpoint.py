"""One safetensors file holds everything a run needs to go on: parameters, optimiser state, the number of steps done.

    model/<name>                                   parameters and persistent buffers
    optimiser/<parameter>/{exp_avg, exp_avg_sq, step}
    metadata "polyhead"                            JSON: format, digest, step, seconds, loss scale

Batches and dropout are pure functions of (seed, step), so no generator state is stored.  Nothing is ever unpickled.
"""

import json
import pathlib
import zlib
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from polyhead import config as configs
from polyhead.config import Run
from polyhead.models.build import build
from polyhead.train.folder import CHECKPOINT, read_config, write

FORMAT = 1
_STATES = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(
    folder: pathlib.Path, model: nn.Module, optimiser: torch.optim.Optimizer, metadata: dict[str, Any]
) -> None:
    """Replace the folder's checkpoint in one step.  Raises OSError (full disk) and then leaves the old one whole."""
    tensors = {f"model/{name}": _copy(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimiser.state.get(parameter, {})
        tensors |= {f"optimiser/{name}/{key}": _copy(state[key]) for key in _STATES if key in state}
    text = json.dumps({"format": FORMAT, **metadata, "checksum": _checksum(tensors)})
    path = folder / CHECKPOINT
    try:
        write(path, save(tensors, {"polyhead": text}))
    except OSError as error:
        kept = "the last good checkpoint is untouched" if path.exists() else "there is no earlier checkpoint"
        raise OSError(error.errno, f"{error.strerror}; {kept}") from None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()  # a copy: tied tensors may not share memory in the file


def _checksum(tensors: dict[str, Tensor]) -> int:
    """Safetensors checks sizes only; a flipped bit must not pass for a parameter."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), value))
    return value


def read_checkpoint(folder: pathlib.Path, digest: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata.  Raises ValueError for a file that is damaged, foreign or of another run."""
    path = folder / CHECKPOINT
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("polyhead")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise ValueError(f"checkpoint: {path} does not exist: this run has not been trained yet") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint: {path} is damaged ({' '.join(str(error).split())})") from None
    if text is None:
        raise ValueError(f"checkpoint: {path} was not written by polyhead")
    try:
        metadata = json.loads(text)
        if not isinstance(metadata, dict):
            raise ValueError
    except ValueError:
        raise ValueError(f"checkpoint: {path} is damaged (its metadata cannot be read)") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {metadata.get('format')} but this version reads {FORMAT}")
    if lost := [name for name in ("checksum", "digest", "step") if name not in metadata]:
        raise ValueError(f"checkpoint: {path} is damaged (its metadata lacks {lost[0]!r})")
    if metadata["checksum"] != _checksum(tensors):
        raise ValueError(f"checkpoint: {path} is damaged (its contents do not match their checksum)")
    if metadata["digest"] != digest:
        raise ValueError(f"checkpoint: {path} belongs to run {metadata['digest']} but the folder's run is {digest}")
    return tensors, metadata


def load_weights(model: nn.Module, tensors: dict[str, Tensor], path: object) -> None:
    """Fill `model` from a checkpoint's tensors.  Raises ValueError naming what is missing, left over or misshapen."""
    stored = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    wanted = model.state_dict()
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ValueError(f"checkpoint: {path} lacks {len(missing)} parameters of the model, first {missing[0]!r}")
    if extra := sorted(stored.keys() - wanted.keys()):
        raise ValueError(f"checkpoint: {path} has {len(extra)} parameters the model lacks, first {extra[0]!r}")
    for name, value in wanted.items():
        if value.shape != stored[name].shape:
            came, want = tuple(stored[name].shape), tuple(value.shape)
            raise ValueError(f"checkpoint: {path} has {name!r} of shape {came} but the model wants {want}")
    model.load_state_dict(stored)


def load_optimiser(
    model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], path: object
) -> None:
    """Fill the optimiser's state, parameter by parameter, by name."""
    for name, parameter in model.named_parameters():
        keys = [f"optimiser/{name}/{key}" for key in _STATES]
        found = [key in tensors for key in keys]
        if not any(found):
            continue  # a parameter that has had no gradient yet
        if not all(found):
            raise ValueError(f"checkpoint: {path} lacks {keys[found.index(False)]!r}")
        state = {key: tensors[full] for key, full in zip(_STATES, keys, strict=True)}
        if state["exp_avg"].shape != parameter.shape or state["exp_avg_sq"].shape != parameter.shape:
            raise ValueError(f"checkpoint: {path} has optimiser state of another shape for {name!r}")
        place = dict.fromkeys(("exp_avg", "exp_avg_sq"), parameter.device)
        place["step"] = parameter.device if optimiser.defaults["fused"] else torch.device("cpu")
        optimiser.state[parameter] = {key: value.to(place[key], copy=True) for key, value in state.items()}


def load_model(folder: str | pathlib.Path, device: str | torch.device = "cpu") -> tuple[Run, Any]:
    """The run of a folder and its trained model, in eval mode on `device`."""
    config = read_config(folder)
    path = pathlib.Path(config.folder or folder)
    tensors, _ = read_checkpoint(path, configs.digest(config))
    with torch.random.fork_rng(devices=[]):
        model = build(config.model)
    load_weights(model, tensors, path / CHECKPOINT)
    return config, model.to(device).eval()
