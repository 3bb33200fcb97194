"""data.json in a run's folder: which data the run was begun with, so that it cannot resume with others unnoticed."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

RECORD = "data.json"


def fingerprint(parts: Iterable[Tensor]) -> str:
    """A hash of the values, dtypes and shapes of tensors, in their order."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        kind = f"{part.dtype} {tuple(part.shape)}"
        total.update(f"{len(kind)} {kind}".encode())
        total.update(part.numpy().tobytes())
    return total.hexdigest()


def keep(
    caller: str, folder: str | os.PathLike[str], data: str, data_digest: str, text: Mapping[str, Any] | None = None
) -> None:
    """Write the name `data`, its fingerprint and of a text its "tokenizer" and "splits" to `folder`/data.json.

    Raises ValueError if the file says that the run in the folder was begun with other data or another tokenizer.
    """
    entries: dict[tuple[str, ...], tuple[str, str]] = {("fingerprint",): ("other data", data_digest)}
    if text:
        entries = {
            ("fingerprint",): ("another text", data_digest),
            ("tokenizer", "digest"): ("another tokenizer", text["tokenizer"]["digest"]),
        }
    for keys, (difference, now) in entries.items():
        before = recorded(caller, folder, *keys)
        if before not in (None, now):
            raise ValueError(f"{caller}: {folder} was begun with {difference} of {data} ({before}, not {now})")
    content = {"data": data, "fingerprint": data_digest, **(text or {})}
    write(pathlib.Path(folder, RECORD), json.dumps(content, indent=2).encode() + b"\n")


def recorded(caller: str, folder: str | os.PathLike[str], *keys: str) -> str | None:
    """The entry at `keys` of `folder`/data.json; None without the file.  Raises ValueError for a damaged file."""
    path = pathlib.Path(folder, RECORD)
    if not path.exists():
        return None
    try:
        entry = json.loads(path.read_bytes())
        for key in keys:
            entry = entry[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "delete it if the data are the same as before"
        raise ValueError(f"{caller}: {path} cannot be read ({' '.join(str(error).split())}); {hint}") from None
    return str(entry)


def write(path: pathlib.Path, data: bytes) -> None:
    """Write a file atomically and flush it to disk."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    part.replace(path)
