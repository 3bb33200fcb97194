"""A checkpoint has all that resuming needs: parameters, optimiser state, number of steps, loss scale.

    checkpoint.safetensors               the newest of a run whose processes each hold the whole model
    checkpoint-<step>.safetensors        earlier ones
    checkpoint-<step>.sharded/           of a sharded run: files of PyTorch's distributed checkpoints, and about.json

    model/<name>                                   parameters and persistent buffers
    optimiser/<parameter>/{exp_avg, exp_avg_sq, step}
    metadata "polyhead", or about.json             JSON: format, digest, step, seconds, loss scale, checksums

Batches and dropout are pure functions of (seed, step), so no generator state is stored.  Nothing is unpickled.
"""

import json
import os
import pathlib
import warnings
import zlib
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from polyhead import config as configs
from polyhead.config import Run
from polyhead.models.build import build
from polyhead.train.device import usual_defaults
from polyhead.train.parallel import like, whole
from polyhead.train.store.files import Damaged, delete, one_line, sync_folder, write, write_beside
from polyhead.train.store.folder import CHECKPOINT, EARLIER, checkpoint_files, read_config
from polyhead.train.world import World

if TYPE_CHECKING:
    from polyhead.train.network import Network

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
ABOUT = "about.json"
MAX_HEADER = 1 << 28
"""The longest header that is read; that of a damaged file may have any length."""
UNKNOWN = 1 << 62
"""In place of the step of a checkpoint whose metadata are damaged: it is tried first."""


# -------------------------------------------------------------------------------------------------------------- saving
def save_checkpoint(folder: pathlib.Path, network: "Network", metadata: dict[str, Any], num_kept: int) -> None:
    """Write a new checkpoint and delete all but the last `num_kept`; all processes call it.  Raises OSError."""
    # Every process takes part in putting the tensors of a sharded model together; process 0 writes.
    tensors = {}
    for name, value in training_state(network):
        tensor = whole(value)
        if network.world.first:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    if not network.world.first:
        return
    data = save(tensors, {"polyhead": json.dumps(with_checksums(metadata, tensors))})
    # The new file is complete before the old one is renamed, so at any moment one of them can be read.
    newest = folder / CHECKPOINT
    partial = write_beside(newest, data)
    if newest.exists() and step_of(newest) < metadata["step"]:
        os.replace(newest, folder / f"{EARLIER.format(step_of(newest))}.safetensors")
    os.replace(partial, newest)
    sync_folder(folder)
    delete_old_checkpoints(folder, num_kept)


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
        cause = _first_failure(error)
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{partial}: cannot be written ({cause.strerror})") from None
        raise
    checksums = _file_checksums(partial, world, sync=True)

    # The folder gets its final name after its last file, so a folder of that name is always complete.
    def finish() -> None:
        write(partial / ABOUT, json.dumps(with_checksums({**metadata, "files": checksums}, {})).encode())
        delete(path)
        os.replace(partial, path)
        sync_folder(folder)
        delete_old_checkpoints(folder, num_kept)

    world.on_rank_zero(finish)


def _first_failure(error: Any) -> BaseException:
    """The cause of a CheckpointException: what failed in one of the processes."""
    return next(iter(error.failures.values()))[0]


def _file_checksums(folder: pathlib.Path, world: World, *, sync: bool = False) -> dict[str, int]:
    """The checksums of the files of a sharded checkpoint; each process reads some of the files."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    checksums = torch.zeros(len(names), dtype=torch.int64)
    for i in range(world.rank, len(names), world.size):
        with open(folder / names[i], "rb") as file:
            data = file.read(1 << 24)
            while data:
                checksums[i] = zlib.crc32(data, int(checksums[i]))
                data = file.read(1 << 24)
            if sync:
                os.fsync(file.fileno())
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
    untied = {name for name, _ in network.model.named_parameters()}
    every = {name for name, _ in network.model.named_parameters(remove_duplicate=False)}
    tied = {f"model/{name}" for name in every - untied}
    return {name: value for name, value in training_state(network) if name not in tied}


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


def delete_old_checkpoints(folder: pathlib.Path, num_kept: int) -> None:
    """Delete all checkpoints except the last `num_kept`."""
    for path in checkpoints(folder)[num_kept:]:
        delete(path)


# ------------------------------------------------------------------------------------------------------------- reading
def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints from which a run can resume, the newest first; of one step the whole file before its parts."""
    return sorted(checkpoint_files(folder), key=lambda path: (step_of(path), path.is_file()), reverse=True)


def step_of(path: pathlib.Path) -> int:
    """The step of a checkpoint, from its name or its metadata; UNKNOWN if these are damaged.  Raises OSError."""
    step = path.stem.removeprefix("checkpoint-")
    if step.isdecimal():
        return int(step)
    try:
        return int(read_metadata(path)["step"])
    except ValueError:
        return UNKNOWN


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Raises Damaged; ValueError for a missing file and for another format; OSError for a file that cannot be read.
    """
    # Python opens the file, because safetensors refuses folders whose names are not UTF-8 and mounts without mmap.
    try:
        if path.is_dir():
            values = json.loads((path / ABOUT).read_bytes())
        else:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, MAX_HEADER)))
            values = json.loads(header["__metadata__"]["polyhead"])
        seal = values.pop("seal")
        if seal != zlib.crc32(json.dumps(values).encode()):
            raise ValueError("its metadata do not match their checksum")
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, expected {FORMAT}")
        if not 0 <= int(values["step"]) < UNKNOWN or not isinstance(values["digest"], str):
            raise ValueError("its metadata lack a step or a digest")
    except FileNotFoundError:
        raise ValueError(f"checkpoint: {path} does not exist: this run has not been trained yet") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"checkpoint: {path} is damaged, or no checkpoint of polyhead ({one_line(error)})") from None
    return dict(values)


def read_checkpoint(path: pathlib.Path, digest: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a file.  Raises as read_metadata, and ValueError for a checkpoint of another run."""
    metadata = read_metadata(path)
    check_digest(path, metadata, digest)
    try:
        tensors = load(path.read_bytes())
    except SafetensorError as error:
        raise Damaged(f"checkpoint: {path} is damaged ({one_line(error)})") from None
    if metadata["checksum"] != checksum_of(tensors):
        raise Damaged(f"checkpoint: {path} is damaged (its tensors do not match their checksum)")
    return tensors, metadata


def check_digest(path: pathlib.Path, metadata: dict[str, Any], digest: str) -> None:
    """Raise a ValueError for a checkpoint of another run."""
    if metadata["digest"] != digest:
        text = f"belongs to run {metadata['digest']} but the folder's run is {digest}; choose another, or --again"
        raise ValueError(f"checkpoint: {path} {text}")


def restore(path: pathlib.Path, digest: str, network: "Network") -> dict[str, Any]:
    """Load a checkpoint into a network; all processes call it.  Returns its metadata.

    Raises as read_checkpoint, and ValueError for a checkpoint of another model.
    """
    if path.is_dir():
        return _restore_sharded(path, digest, network)
    tensors, metadata = read_checkpoint(path, digest)
    load_weights(network.model, tensors, path)
    # AdamW makes its moments at the first update, so a new optimiser has none to copy into.
    _make_state(network, tensors)
    for name, value in training_state(network):
        if name.startswith("optimiser/"):
            value.copy_(like(tensors[name], value))
    return metadata


def _restore_sharded(path: pathlib.Path, digest: str, network: "Network") -> dict[str, Any]:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    metadata = read_metadata(path)
    check_digest(path, metadata, digest)
    if metadata["files"] != _file_checksums(path, network.world):
        raise Damaged(f"checkpoint: {path} is damaged (its files do not match their checksums)")
    reader = HuggingFaceStorageReader(str(path))
    _make_state(network, reader.read_metadata().state_dict_metadata)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended for a single process
            dcp.load(_untied_state(network), storage_reader=reader, no_dist=network.world.size == 1)
    except (CheckpointException, RuntimeError, ValueError) as error:
        cause = _first_failure(error) if isinstance(error, CheckpointException) else error
        raise ValueError(f"checkpoint: {path} does not fit the model of this run ({one_line(cause)})") from None
    return metadata


def _make_state(network: "Network", stored: Container[str]) -> None:
    """Give the optimiser the tensors that a checkpoint has; a parameter without a gradient so far has none."""
    for name, parameter in network.model.named_parameters():
        if f"optimiser/{name}/step" in stored:
            # The device on which AdamW counts the updates of a parameter.
            device = parameter.device if network.optimiser.defaults["fused"] else torch.device("cpu")
            moments = {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
            network.optimiser.state[parameter] = {**moments, "step": torch.zeros((), device=device)}


def load_weights(model: nn.Module, tensors: dict[str, Tensor], path: object) -> None:
    """Load a checkpoint's tensors into `model`.  Raises ValueError for missing, extra or misshapen tensors."""
    expected = model.state_dict()
    stored = {}
    for name, value in tensors.items():
        key = name.removeprefix("model/")
        if key != name:
            stored[key] = value
            if key in expected and expected[key].shape == value.shape:
                stored[key] = like(value, expected[key])
    try:
        model.load_state_dict(stored)
    except RuntimeError as error:
        raise ValueError(f"checkpoint: {path} does not fit the model of this run ({one_line(error)})") from None


def load_model(
    folder: str | pathlib.Path, device: str | torch.device = "cpu", which: str | int = "newest"
) -> tuple[Run, Any]:
    """The run of a folder and its trained model in eval mode on `device`.

    `which`: "newest", or the step of an existing checkpoint.
    """
    config = read_config(folder)
    path = _path_of(pathlib.Path(config.folder or folder), which)
    tensors, _ = read_checkpoint(path, configs.digest(config))
    # Building draws initial weights, which must not advance the caller's random numbers.
    with usual_defaults(), torch.random.fork_rng(devices=[]):
        model = build(config.model)
    load_weights(model, tensors, path)
    return config, model.to(device).eval()


def _path_of(folder: pathlib.Path, name: str | int) -> pathlib.Path:
    """The checkpoint that `load_model` calls by `name`.  Raises ValueError for one that is not there, or in parts."""
    paths = checkpoints(folder)  # the newest first
    if not paths:
        return folder / CHECKPOINT  # whose absence its reader reports
    path_by_name = {"newest": paths[0]}
    for path in paths:
        path_by_name.setdefault(str(step_of(path)), path)
    if str(name) not in path_by_name:
        raise ValueError(f"checkpoint: {folder} has none of {name!r} (choose from {', '.join(path_by_name)})")
    path = path_by_name[str(name)]
    if path.is_dir():
        raise ValueError(f"checkpoint: {path} is in parts: `polyhead resume {folder}` until the run is done")
    return path
