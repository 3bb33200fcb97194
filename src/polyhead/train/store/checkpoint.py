"""A checkpoint has all that resuming needs: parameters, optimiser state, number of steps, loss scale.

    checkpoint.safetensors                         the newest; checkpoint-<step>.safetensors are earlier ones
    checkpoint-<step>.sharded/                     files of PyTorch's distributed checkpoints, and about.json

    model/<name>                                   parameters and persistent buffers
    optimiser/<parameter>/{exp_avg, exp_avg_sq, step}
    metadata "polyhead", or about.json             JSON: format, digest, step, seconds, loss scale, checksums

Batches and dropout are pure functions of (seed, step), so no generator state is stored.  Nothing is unpickled.
"""

import contextlib
import json
import math
import os
import pathlib
import zlib
from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from polyhead import config as configs
from polyhead.config import Run
from polyhead.models.build import build
from polyhead.spec.values import one_line
from polyhead.train.device import usual_defaults
from polyhead.train.parallel import distributed_like, full_tensor
from polyhead.train.store.files import Damaged, delete, write
from polyhead.train.store.folder import CHECKPOINT, EARLIER, checkpoints, read_config
from polyhead.train.world import World

if TYPE_CHECKING:
    from polyhead.train.network import Network

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
ABOUT = "about.json"


# -------------------------------------------------------------------------------------------------------------- saving
def save_checkpoint(folder: pathlib.Path, network: "Network", metadata: dict[str, Any], num_kept: int) -> None:
    """Write a new checkpoint and delete all but the last `num_kept`; all processes call it.  Raises OSError."""
    # Every process takes part in putting the tensors of a sharded model together; process 0 writes.
    tensors = {}
    for name, value in training_state(network):
        tensor = full_tensor(value)
        if network.world.first:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    if network.world.first:
        data = save(tensors, {"polyhead": json.dumps(with_checksums(metadata, tensors))})
        with _replacing(folder, metadata["step"], num_kept):
            write(folder / CHECKPOINT, data)


def save_sharded(folder: pathlib.Path, network: "Network", metadata: dict[str, Any], num_kept: int) -> None:
    """`save_checkpoint` for a sharded model: each process writes its part.  Raises OSError."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    world = network.world
    path = folder / f"{EARLIER.format(metadata['step'])}.sharded"
    partial = path.with_name(path.name + ".partial")
    world.on_rank_zero(lambda: delete(partial))
    try:
        dcp.save(_untied_state(network), storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise OSError(getattr(cause, "errno", None), f"{partial}: cannot be written ({one_line(cause)})") from None
    checksums = _file_checksums(partial, world)

    # The folder gets its final name after its last file, so a folder of that name is always complete.
    def finish() -> None:
        write(partial / ABOUT, json.dumps(with_checksums({**metadata, "files": checksums}, {})).encode())
        with _replacing(folder, metadata["step"], num_kept):
            delete(path)
            os.replace(partial, path)

    world.on_rank_zero(finish)


@contextlib.contextmanager
def _replacing(folder: pathlib.Path, step: int, num_kept: int) -> Iterator[None]:
    """A context that writes the checkpoint of `step`: the one before gets the name of its step, older ones go."""
    with contextlib.suppress(Damaged):
        newest = read_metadata(folder / CHECKPOINT)["step"]
        if newest < step:
            os.replace(folder / CHECKPOINT, folder / f"{EARLIER.format(newest)}.safetensors")
    yield
    # A later step is that of a damaged checkpoint, before which the run has resumed.
    paths = []
    for path in checkpoints(folder):
        if path.name == CHECKPOINT or int(path.stem.removeprefix("checkpoint-")) <= step:
            paths.append(path)
        else:
            delete(path)
    for path in paths[num_kept:]:
        delete(path)


def _file_checksums(folder: pathlib.Path, world: World) -> dict[str, int]:
    """The checksums of the files of a sharded checkpoint; each process reads some of the files."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    checksums = torch.zeros(len(names), dtype=torch.int64)
    for i in range(world.rank, len(names), world.size):
        with open(folder / names[i], "rb") as file:
            data = file.read(1 << 24)
            while data:
                checksums[i] = zlib.crc32(data, int(checksums[i]))
                data = file.read(1 << 24)
    return dict(zip(names, world.sum(checksums).tolist(), strict=True))


def training_state(network: "Network") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name."""
    for name, value in network.model.state_dict().items():
        yield f"model/{name}", value.detach()
    for name, parameter in network.model.named_parameters():
        state = network.optimiser.state.get(parameter, {})
        for key in (*MOMENTS, "step"):
            if key in state:
                yield f"optimiser/{name}/{key}", state[key]


def _untied_state(network: "Network") -> dict[str, Tensor]:
    """The tensors of a sharded checkpoint: of tied parameters only the first, because their memory is shared."""
    untied = dict(network.model.named_parameters())
    tied = dict(network.model.named_parameters(remove_duplicate=False)).keys() - untied.keys()
    return {name: value for name, value in training_state(network) if name.removeprefix("model/") not in tied}


def checksum_of(tensors: dict[str, Tensor]) -> int:
    """The checksum of tensors and their names: safetensors checks only sizes, so it would miss a flipped bit."""
    checksum = 0
    for name in sorted(tensors):
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        checksum = zlib.crc32(data, zlib.crc32(name.encode(), checksum))
    return checksum


def with_checksums(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The metadata with the checksum of the tensors, and with that of the metadata themselves."""
    values = {"format": FORMAT, **metadata, "checksum": checksum_of(tensors)}
    return {**values, "seal": zlib.crc32(json.dumps(values).encode())}


# ------------------------------------------------------------------------------------------------------------- reading
def read_metadata(path: pathlib.Path, digest: str | None = None) -> dict[str, Any]:
    """The metadata of a checkpoint.  Raises Damaged; ValueError for another format, or another run than `digest`."""
    # Python opens the file, because safetensors refuses folders whose names are not UTF-8 and mounts without mmap.
    try:
        if path.is_dir():
            values = json.loads((path / ABOUT).read_bytes())
        else:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, 1 << 28)))  # damaged, it may be any number
            values = json.loads(header["__metadata__"]["polyhead"])
        seal = values.pop("seal")
        if seal != zlib.crc32(json.dumps(values).encode()):
            raise ValueError("its metadata do not match their checksum")
        values |= {"format": int(values["format"]), "step": int(values["step"]), "digest": str(values["digest"])}
        values["seconds"] = float(values.get("seconds", 0.0))
        if values["step"] < 0 or not math.isfinite(values["seconds"]):
            raise ValueError(f"step {values['step']} after {values['seconds']} seconds")
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"checkpoint: {path} is damaged, or no checkpoint of polyhead ({one_line(error)})") from None
    if values["format"] != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {values['format']}, expected {FORMAT}")
    if digest not in (None, values["digest"]):
        text = f"belongs to run {values['digest']} but the folder's run is {digest}; choose another, or --again"
        raise ValueError(f"checkpoint: {path} {text}")
    return dict(values)


def read_checkpoint(path: pathlib.Path, digest: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a file.  Raises as read_metadata."""
    metadata = read_metadata(path, digest)
    try:
        tensors = load(path.read_bytes())
    except SafetensorError as error:
        raise Damaged(f"checkpoint: {path} is damaged ({one_line(error)})") from None
    if metadata.get("checksum") != checksum_of(tensors):
        raise Damaged(f"checkpoint: {path} is damaged (its tensors do not match their checksum)")
    return tensors, metadata


def restore(path: pathlib.Path, digest: str, network: "Network") -> dict[str, Any]:
    """Load a checkpoint into a network, in all processes; return its metadata.  Raises as read_checkpoint and _copy."""
    if path.is_file():
        tensors, metadata = read_checkpoint(path, digest)
        _make_state(network, tensors)
        _copy(tensors, dict(training_state(network)), path)
        return metadata
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    metadata = read_metadata(path, digest)
    if metadata.get("files") != _file_checksums(path, network.world):
        raise Damaged(f"checkpoint: {path} is damaged (its files do not match their checksums)")
    reader = HuggingFaceStorageReader(str(path))
    try:
        _make_state(network, reader.read_metadata().state_dict_metadata)
        dcp.load(_untied_state(network), storage_reader=reader, no_dist=network.world.size == 1)
    except (CheckpointException, SafetensorError) as error:
        raise Damaged(f"checkpoint: {path} is damaged, or does not fit the model ({type(error).__name__})") from error
    return metadata


def _make_state(network: "Network", stored: Container[str]) -> None:
    """Give the optimiser the tensors that a checkpoint has: AdamW makes them for a parameter's first gradient."""
    for name, parameter in network.model.named_parameters():
        if f"optimiser/{name}/step" in stored:
            # The device on which AdamW counts the updates of a parameter.
            device = parameter.device if network.optimiser.defaults["fused"] else torch.device("cpu")
            moments = {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
            network.optimiser.state[parameter] = {**moments, "step": torch.zeros((), device=device)}


def _copy(stored: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: pathlib.Path) -> None:
    """Copy stored tensors into `tensors`.  Raises ValueError unless they have the same names, shapes and dtypes."""
    before = {name: f"{tuple(value.shape)} of {value.dtype}" for name, value in stored.items()}
    expected = {name: f"{tuple(value.shape)} of {value.dtype}" for name, value in tensors.items()}
    for name in sorted(before | expected):
        if before.get(name) != expected.get(name):
            text = f"{name}: {before.get(name, 'missing')}, expected {expected.get(name, 'nothing')}"
            raise ValueError(f"checkpoint: {path} does not fit the model of this run ({text})")
    for name, value in tensors.items():
        value.copy_(distributed_like(stored[name], value))


def load_model(
    folder: str | pathlib.Path, device: str | torch.device = "cpu", which: str | int = "newest"
) -> tuple[Run, Any]:
    """The run of a folder and its trained model in eval mode on `device`.

    Args:
        which: "newest", or the step of an earlier checkpoint.
    """
    config = read_config(folder)
    paths = checkpoints(pathlib.Path(config.folder or folder))
    names = ", ".join(map(str, paths)) or "none at all: train it first"
    if which != "newest":
        paths = [path for path in paths if path.stem == f"checkpoint-{which!s:0>8}"]
    if not paths:
        raise ValueError(f"checkpoint: {folder} has none of {which!r}, but {names}")
    if paths[0].is_dir():
        raise ValueError(f"checkpoint: {paths[0]} is in parts: `polyhead resume {folder}` until the run is done")
    tensors, _ = read_checkpoint(paths[0], configs.digest(config))
    # Building draws initial weights, which must not advance the caller's random numbers.
    with usual_defaults(), torch.random.fork_rng(devices=[]):
        model = build(config.model)
    weights = {name: value for name, value in tensors.items() if name.startswith("model/")}
    _copy(weights, {f"model/{name}": value for name, value in model.state_dict().items()}, paths[0])
    return config, model.to(device).eval()
