"""Checkpoints of sharded runs: every rank writes its part, and any number of ranks can read them.

    checkpoint-<step>.sharded/
        shard-<process>.safetensors     pieces of tensors, named <tensor>@<offsets>
        index.json                      the file of each piece, its checksum, and the metadata of a checkpoint

Tensors have the same names as in checkpoint.py.  PyTorch's `torch.distributed.checkpoint` plans which rank writes and
reads which piece, so the number of ranks may change.  Its own storage pickles the index; ours is JSON.  The index is
written last; then the folder gets its final name.
"""

import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, distributed as dist, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from polyhead.train.store.checkpoint import STATES, another_run, check_kinds, rotate, state, step_place
from polyhead.train.store.disk import Retry, once
from polyhead.train.store.files import Damaged, checksum, forget, one_line, seal, sync_folder, unseal, write
from polyhead.train.store.folder import EARLIER

FORMAT = 1
INDEX, PARTIAL = "index.json", ".partial"
_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
_DTYPES |= {str(t).removeprefix("torch."): t for t in (torch.int64, torch.int32, torch.uint8, torch.bool)}


def save_sharded(
    folder: pathlib.Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    metadata: dict[str, Any],
    *,
    keep: int = 1,
    retry: Retry = once,
) -> None:
    """`save_checkpoint` for a sharded model; called by all processes.  If one cannot write, all raise OSError."""
    path = folder / f"{EARLIER.format(metadata['step'])}.sharded"
    tensors = dict(state(model, optimiser))

    retry(lambda: _together(lambda: dcp.save(tensors, storage_writer=ShardWriter(path, metadata))))
    if dist.get_rank() == 0:  # alone, so not part of what all processes try again together
        retry(lambda: rotate(folder, keep))


def restore_sharded(
    path: pathlib.Path, digest: str, model: nn.Module, optimiser: torch.optim.Optimizer
) -> dict[str, Any]:
    """`restore` from a folder of shards into a sharded, data-parallel or single-process model; called by all processes.

    Raises Damaged for a damaged folder, ValueError for one of another run, version or model.
    """
    index = read_index(path)
    if index["digest"] != digest:
        raise ValueError(another_run(path, index["digest"], digest))
    stored = index["tensors"]
    tensors = {f"model/{name}": value.detach() for name, value in model.state_dict().items()}
    if strange := sorted(tensors.keys() ^ {name for name in stored if name.startswith("model/")}):
        raise ValueError(f"checkpoint: {path} and the model do not have the same parameters, first {strange[0]!r}")
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if f"optimiser/{name}/step" not in stored:
            continue  # this parameter has had no gradient yet
        moments = {key: torch.zeros_like(parameter.detach()) for key in STATES[:2]}
        states[parameter] = {**moments, "step": torch.zeros((), device=step_place(optimiser, parameter))}
        tensors |= {f"optimiser/{name}/{key}": value for key, value in states[parameter].items()}
    for name, value in tensors.items():
        if name not in stored or stored[name]["shape"] != list(value.shape):
            came = stored.get(name, {}).get("shape")
            raise ValueError(f"checkpoint: {path} has {name!r} of shape {came} but {list(value.shape)} is wanted")
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended for a single process
        _together(lambda: dcp.load(tensors, storage_reader=ShardReader(path, index), no_dist=alone))
    for parameter, filled in states.items():
        optimiser.state[parameter] = filled
    return {name: value for name, value in index.items() if name != "tensors"}


def read_index(path: pathlib.Path) -> dict[str, Any]:
    """The index of a folder, checked.  Raises Damaged, and ValueError for another version."""
    try:
        values = json.loads((path / INDEX).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint: {path} is damaged (its index cannot be read: {one_line(error)})") from None
    index = unseal(values, f"checkpoint: {path}")
    if index.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {index.get('format')!r} but this version reads {FORMAT}")
    try:
        for name in ("digest", "step", "seconds"):
            index[name]
        for entry in index["tensors"].values():
            _check_entry(entry, path)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"checkpoint: {path} is damaged (its index lacks {one_line(error)})") from None
    check_kinds(index, path)
    return index


def _check_entry(entry: dict[str, Any], path: pathlib.Path) -> None:
    """Check one tensor of an index: its pieces cover it, and their files exist in this folder."""
    shape, filled = entry["shape"], 0
    _DTYPES[entry["dtype"]]
    for chunk in entry["chunks"]:
        sizes, offsets, file = chunk["shape"], chunk["offset"], chunk["file"]
        inside = all(o >= 0 and n > 0 and o + n <= s for o, n, s in zip(offsets, sizes, shape, strict=True))
        if not inside or pathlib.PurePath(file).name != file or not (path / file).is_file():
            raise ValueError(f"{file}, or a place for what it holds")
        filled += math.prod(sizes)
        int(chunk["checksum"])
    if filled != math.prod(shape):
        raise ValueError("pieces of a tensor")


def _together(action: Callable[[], object]) -> None:
    """Call `action` on all ranks; if one rank fails, all raise its error."""
    try:
        action()
    except CheckpointException as error:
        failed = list(error.failures.values())
        for kind in (Damaged, OSError):
            for raised in (wrapped[0] for wrapped in failed):
                if isinstance(raised, kind):
                    raise raised from None
        raise RuntimeError(f"checkpoint: {one_line(failed[0][0])}") from failed[0][0]


class ShardWriter(dcp.StorageWriter):
    """Writes one safetensors file per rank; then rank 0 writes the index."""

    def __init__(self, path: pathlib.Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.partial = path.with_name(path.name + PARTIAL)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called on rank 0 only, before any rank writes."""
        forget(self.partial)
        self.partial.mkdir()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        file, pieces, found = f"shard-{dist.get_rank():05}.safetensors", {}, []
        for item in plan.items:
            if item.tensor_data is None:
                raise ValueError(f"checkpoint: {item.index.fqn} is no tensor")
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            if not tensor.numel():
                continue
            offset = list(item.tensor_data.chunk.offsets)
            key = _key(item.index.fqn, offset)
            pieces[key] = tensor.detach().to("cpu", copy=True).contiguous()
            chunk: dict[str, Any] = {"offset": offset, "shape": list(tensor.shape), "file": file}
            chunk["checksum"] = checksum({key: pieces[key]})
            found.append(WriteResult(item.index, tensor.nbytes, chunk))
        write(self.partial / file, save(pieces))
        done: Future[list[WriteResult]] = Future()
        done.set_result(found)
        return done

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, meta.TensorStorageMetadata)
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": []}
        for result in (one for some in results for one in some):
            tensors[result.index.fqn]["chunks"].append(result.storage_data)
        text = json.dumps(seal({"format": FORMAT, **self.about, "tensors": tensors}))
        write(self.partial / INDEX, text.encode())
        forget(self.path)
        os.replace(self.partial, self.path)
        sync_folder(self.path.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ShardReader(dcp.StorageReader):
    """Reads and checks the pieces that this rank needs."""

    def __init__(self, path: pathlib.Path, index: dict[str, Any]) -> None:
        self.path, self.index = path, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self) -> meta.Metadata:
        entries: dict[str, meta.STORAGE_TYPES] = {}
        for name, entry in self.index["tensors"].items():
            properties = meta.TensorProperties(dtype=_DTYPES[entry["dtype"]])
            places = [(torch.Size(chunk["offset"]), torch.Size(chunk["shape"])) for chunk in entry["chunks"]]
            chunks = [meta.ChunkStorageMetadata(offset, shape) for offset, shape in places]
            entries[name] = meta.TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return meta.Metadata(entries)

    def set_up_storage_reader(self, metadata: meta.Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        for item in plan.items:
            name, offset = item.storage_index.fqn, list(item.storage_index.offset or ())
            piece = self._piece(name, offset)
            for axis, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(axis, first, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, name: str, offset: list[int]) -> Tensor:
        entry, key = self.index["tensors"][name], _key(name, offset)
        chunk = next(chunk for chunk in entry["chunks"] if chunk["offset"] == offset)
        path = self.path / chunk["file"]
        try:
            with safe_open(path, "pt") as file:
                tensor: Tensor = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise Damaged(f"checkpoint: {path} is damaged ({one_line(error)})") from None
        said = (chunk["shape"], _DTYPES[entry["dtype"]], chunk["checksum"])
        if (list(tensor.shape), tensor.dtype, checksum({key: tensor})) != said:
            raise Damaged(f"checkpoint: {path} is damaged (its contents do not match their checksum)")
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _key(name: str, offset: list[int]) -> str:
    return f"{name}@{','.join(map(str, offset))}"
