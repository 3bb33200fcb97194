"""The batch at which a run diverged, saved for inspection."""

import json
import pathlib
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyhead.config import Batch
from polyhead.train.store.files import Damaged, checksum, one_line, packed, unseal, write
from polyhead.train.store.folder import BAD_BATCH

_LATENT = "latents/"


def write_batch(path: pathlib.Path, batch: Batch, metadata: dict[str, Any]) -> None:
    """Write a batch for `read_batch`.  Raises OSError."""
    fields = {name: getattr(batch, name) for name in ("inputs", "targets", "mask", "scored", "source", "source_mask")}
    fields |= {_LATENT + name: value for name, value in batch.latents.items()}
    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous() for name, value in fields.items() if value is not None
    }
    write(path, packed(tensors, metadata))


def read_batch(path: str | pathlib.Path) -> tuple[Batch, dict[str, Any]]:
    """The batch in `bad_batch.safetensors` (or in a run folder with one), and its step, seed, split and run digest.

    It is the batch of update `step`: `task.batch(split, size, seed=seed, step=step - 1, device=...)` with the device of
    the run, because another type of device draws other numbers.

    Raises ValueError for a file that is damaged or holds something else.
    """
    path = pathlib.Path(path)
    path = path / BAD_BATCH if path.is_dir() else path
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("polyhead", "")
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
        metadata = unseal(json.loads(text), f"batch: {path}")
        right = metadata.pop("checksum") == checksum(tensors)
        latents = {name: tensors.pop(name) for name in sorted(tensors) if name.startswith(_LATENT)}
        absent: dict[str, Tensor | None] = dict.fromkeys(("mask", "source", "source_mask"))
        batch = Batch(**(absent | tensors), latents={name.removeprefix(_LATENT): latents[name] for name in latents})
    except FileNotFoundError:
        raise ValueError(f"batch: {path} does not exist") from None
    except (SafetensorError, OSError, ValueError, RecursionError, TypeError, AttributeError, KeyError) as error:
        raise Damaged(f"batch: {path} is damaged or holds no batch ({one_line(error)})") from None
    if not right:
        raise Damaged(f"batch: {path} is damaged (its contents do not match their checksum)")
    return batch, metadata


def first_bad(losses: list[Tensor]) -> int | None:
    """The index of the first loss that is not finite."""
    bad = (~torch.stack(losses).isfinite()).nonzero() if losses else torch.empty(0)
    return int(bad[0]) if len(bad) else None
