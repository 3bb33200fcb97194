"""data.json in a run's folder: which data the run was begun with, so that it cannot resume with others unnoticed."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from polyhead.spec.values import one_line

RECORD = "data.json"


class OtherData(ValueError):
    """The run was begun with other data, whose tokens mean the same."""


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

    If the file says that the run in the folder was begun with other data, raises OtherData; with another tokenizer,
    ValueError.  A file with the same entries is left alone.
    """
    if text:
        earlier, current = recorded(caller, folder, "tokenizer", "digest"), text["tokenizer"]["digest"]
        if earlier not in (None, current):
            difference = f"another tokenizer of {data} ({earlier}, not {current})"
            raise ValueError(f"{caller}: {folder} was begun with {difference}")
    earlier = recorded(caller, folder, "fingerprint")
    if earlier not in (None, data_digest):
        noun = "another text" if text else "other data"
        raise OtherData(f"{caller}: {folder} was begun with {noun} of {data} ({earlier}, not {data_digest})")
    if earlier is not None:
        return
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
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "delete it if the data are the same as before"
        raise ValueError(f"{caller}: {path} cannot be read ({one_line(error)}); {hint}") from None
    return str(entry)


def write(path: pathlib.Path, data: bytes) -> None:
    """Write a file atomically and flush it to disk."""
    part = path.with_name(f"{path.name}.partial")
    part.unlink(missing_ok=True)  # a link of this name in a stranger's folder would lead elsewhere
    with part.open("xb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    part.replace(path)
