"""A checkpoint is one safetensors file with all that resuming needs: parameters, optimiser state, number of steps.

    model/<name>                                   parameters and persistent buffers
    optimiser/<parameter>/{exp_avg, exp_avg_sq, step}
    metadata "polyhead"                            JSON: format, digest, step, seconds, loss scale

Batches and dropout are pure functions of (seed, step), so no generator state is stored.  Nothing is ever unpickled.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from polyhead import config as configs
from polyhead.config import Run
from polyhead.models.build import build
from polyhead.train.device import usual_defaults
from polyhead.train.parallel import like, whole
from polyhead.train.store.disk import Retry, once
from polyhead.train.store.files import Damaged, checksum, forget, link, one_line, packed, unseal, write
from polyhead.train.store.folder import BEST, CHECKPOINT, CONFIG, EARLIER, read_config, saves

FORMAT = 1
MAX_HEADER = 1 << 28
"""The longest header that is read; that of a damaged file may have any length."""
STATES = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(
    folder: pathlib.Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    metadata: dict[str, Any],
    *,
    keep: int = 1,
    best: bool = False,
    retry: Retry = once,
) -> None:
    """Replace the folder's checkpoint atomically; the last `keep` remain.  `best`: also give it the name BEST.

    A complete checkpoint exists at any time.  Raises OSError for a disk error that `retry` does not retry.
    """
    data = _packed(model, optimiser, metadata)
    retry(lambda: _put(folder, data, metadata["step"], keep, best))


def save_best(
    folder: pathlib.Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    metadata: dict[str, Any],
    *,
    retry: Retry = once,
) -> None:
    """Save only the best checkpoint of a model whose other checkpoints are sharded.  Raises as save_checkpoint."""
    data = _packed(model, optimiser, metadata)
    retry(lambda: write(folder / BEST, data))


def _packed(model: nn.Module, optimiser: torch.optim.Optimizer, metadata: dict[str, Any]) -> bytes:
    # Copies, because tied tensors must not share memory in the file.
    tensors = {name: whole(value).to("cpu", copy=True).contiguous() for name, value in state(model, optimiser)}
    return packed(tensors, {"format": FORMAT, **metadata})


def state(model: nn.Module, optimiser: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name."""
    yield from ((f"model/{name}", value.detach()) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        kept = optimiser.state.get(parameter, {})
        yield from ((f"optimiser/{name}/{key}", kept[key]) for key in STATES if key in kept)


def _put(folder: pathlib.Path, data: bytes, step: int, keep: int, best: bool) -> None:
    """Write the file of step `step` and its links; safe to repeat after any failure."""
    path = folder / CHECKPOINT
    if keep > 1 and (earlier := step_of(path)) not in (0, step):  # of this step only if it is repeated
        link(path, folder / f"{EARLIER.format(earlier)}.safetensors")
    write(path, data)
    if best:
        link(path, folder / BEST)
    rotate(folder, keep)


def rotate(folder: pathlib.Path, keep: int) -> None:
    """Delete all checkpoints except the last `keep` and the best."""
    for path in sorted(saves(folder), key=step_of, reverse=True)[keep:]:
        forget(path)


def step_of(path: pathlib.Path) -> int:
    """The step of a checkpoint, from its name or its header; 0 if it cannot be read."""
    if (said := path.stem.removeprefix("checkpoint-")).isdecimal():
        return int(said)
    try:
        return int(read_metadata(path)["step"])
    except (ValueError, OSError):
        return 0


def candidates(folder: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints from which a run can resume, each file once, in the order in which they are tried.

    First sharded ones with a larger step than the newest file, then the newest file, then the others, the largest step
    first, then the best.
    """
    newest, best = folder / CHECKPOINT, folder / BEST
    found = others = sorted((path for path in saves(folder) if path != newest), key=step_of, reverse=True)
    if newest.exists():
        reached = step_of(newest)
        further = [path for path in others if path.suffix == ".sharded" and 0 < reached < step_of(path)]
        found = [*further, newest, *(path for path in others if path not in further)]
    return [*found, best] if best.exists() and not any(best.samefile(path) for path in found) else found


def read_checkpoint(
    folder: pathlib.Path, digest: str, name: str = CHECKPOINT
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata.  Raises Damaged for a damaged file, ValueError for one of another run or version."""
    path = folder / name
    metadata, tensors = read_metadata(path), _tensors(path)
    if metadata["checksum"] != checksum(tensors):
        raise Damaged(f"checkpoint: {path} is damaged (its contents do not match their checksum)")
    if metadata["digest"] != digest:
        raise ValueError(another_run(path, metadata["digest"], digest))
    return tensors, metadata


def another_run(path: pathlib.Path, theirs: str, mine: str) -> str:
    """What is wrong with a checkpoint of another run, and the ways on."""
    other = f"checkpoint: {path} belongs to run {theirs} but the folder's run is {mine}"
    return f"{other}: undo the change of its {CONFIG}, choose another folder, or start over with --again"


def read_header(path: pathlib.Path) -> dict[str, Any]:
    """The header of a safetensors file.  Raises Damaged, and OSError for a file that cannot be read."""
    # Python opens the file, because safetensors refuses folders whose names are not UTF-8 and mounts without mmap.
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER)))
    except FileNotFoundError:
        raise ValueError(f"checkpoint: {path} does not exist: this run has not been trained yet") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"checkpoint: {path} is damaged ({one_line(error)})") from None
    if not isinstance(header, dict):
        raise Damaged(f"checkpoint: {path} is damaged (its header is no table)")
    return header


def _tensors(path: pathlib.Path) -> dict[str, Tensor]:
    try:
        return load(path.read_bytes())
    except SafetensorError as error:
        raise Damaged(f"checkpoint: {path} is damaged ({one_line(error)})") from None


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
    """The metadata of a checkpoint, without its tensors.  Raises as read_checkpoint."""
    about = read_header(path).get("__metadata__")
    text = about.get("polyhead") if isinstance(about, dict) else None
    if text is None:
        raise Damaged(f"checkpoint: {path} was not written by polyhead")
    try:
        values = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise Damaged(f"checkpoint: {path} is damaged (its metadata cannot be read)") from None
    metadata = unseal(values, f"checkpoint: {path}")
    if metadata.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {metadata.get('format')} but this version reads {FORMAT}")
    if lost := [name for name in ("checksum", "digest", "step") if name not in metadata]:
        raise Damaged(f"checkpoint: {path} is damaged (its metadata lacks {lost[0]!r})")
    check_kinds(metadata, path)
    return metadata


_KINDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "rows": (int,),
    "checksum": (int,),
    "digest": (str,),
    "seconds": (int, float),
    "score": (int, float, type(None)),
    "scaler": (dict,),
    "fast_products": (bool,),
}


def check_kinds(metadata: dict[str, Any], path: pathlib.Path) -> None:
    """Raise Damaged for metadata of wrong types: training never writes them, even if the checksum is right."""
    for name, kinds in _KINDS.items():
        value = metadata.get(name, kinds[0]())
        if type(value) not in kinds or (name in ("step", "rows") and not 0 <= value < 1 << 62):
            raise Damaged(f"checkpoint: {path} is damaged (its metadata have {name} {str(value)[:40]!r})")


def load_weights(model: nn.Module, tensors: dict[str, Tensor], path: object) -> None:
    """Load a checkpoint's tensors into `model`.  Raises ValueError for missing, extra or misshapen tensors."""
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
    model.load_state_dict({name: like(stored[name], value) for name, value in wanted.items()})


def load_optimiser(
    model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], path: object
) -> None:
    """Load the optimiser's state for each parameter by name."""
    for name, parameter in model.named_parameters():
        keys = [f"optimiser/{name}/{key}" for key in STATES]
        found = [key in tensors for key in keys]
        if not any(found):
            continue  # this parameter has had no gradient yet
        if not all(found):
            raise ValueError(f"checkpoint: {path} lacks {keys[found.index(False)]!r}")
        state = {key: tensors[full] for key, full in zip(STATES, keys, strict=True)}
        if state["exp_avg"].shape != parameter.shape or state["exp_avg_sq"].shape != parameter.shape:
            raise ValueError(f"checkpoint: {path} has optimiser state of another shape for {name!r}")
        moments = {key: like(state[key], parameter) for key in STATES[:2]}
        steps = state["step"].to(step_place(optimiser, parameter), copy=True)
        optimiser.state[parameter] = {**moments, "step": steps}


def step_place(optimiser: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.device:
    """The device on which AdamW counts the updates of a parameter."""
    return parameter.device if optimiser.defaults["fused"] else torch.device("cpu")


def restore(path: pathlib.Path, digest: str, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into model and optimiser; returns its metadata.  Raises as read_checkpoint."""
    tensors, metadata = read_checkpoint(path.parent, digest, path.name)
    load_weights(model, tensors, path)
    load_optimiser(model, optimiser, tensors, path)
    return metadata


def load_model(
    folder: str | pathlib.Path, device: str | torch.device = "cpu", which: str | int = "newest"
) -> tuple[Run, Any]:
    """The run of a folder and its trained model in eval mode on `device`.

    `which`: "newest"; "best": the best evaluated checkpoint by the main metric, on the validation split or else on
    the first evaluated split; or the step of an existing checkpoint.
    """
    config = read_config(folder)
    path = _find(pathlib.Path(config.folder or folder), which)
    try:
        tensors, _ = read_checkpoint(path.parent, configs.digest(config), path.name)
    except Damaged as error:
        others = [other for other in candidates(path.parent) if other != path and other.suffix == ".safetensors"]
        if not (step := max(map(step_of, others), default=0)):
            raise
        raise Damaged(f"{error}; that of step {step} is there, too: --checkpoint {step}, which={step}") from None
    with usual_defaults(), torch.random.fork_rng(devices=[]):
        model = build(config.model)
    load_weights(model, tensors, path)
    return config, model.to(device).eval()


def _find(folder: pathlib.Path, which: str | int) -> pathlib.Path:
    found, best = candidates(folder), folder / BEST
    if which == "newest":
        if found and found[0].is_dir():
            raise ValueError(f"checkpoint: {found[0]} is in parts: `polyhead resume {folder}` until the run is done")
        return folder / CHECKPOINT
    there = {"best": best} if best.exists() else {}
    there |= {str(step_of(path)): path for path in sorted(found, key=step_of) if path.suffix == ".safetensors"}
    if str(which) not in there:
        held = ", ".join(("newest", *there))
        raise ValueError(f"checkpoint: {folder} has none of {which!r} (choose from {held})")
    return there[str(which)]
