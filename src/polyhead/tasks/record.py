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
    path = pathlib.Path(folder) / RECORD
    content = {"data": data, "fingerprint": data_digest, **(text or {})}
    if path.exists():
        _check_same(caller, path, content)
    write(path, json.dumps(content, indent=2).encode() + b"\n")


def _check_same(caller: str, path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the recorded fingerprint, and the tokenizer of a text, are those of `content`."""
    digests = []
    try:
        recorded = json.loads(path.read_bytes())
        difference = "another text" if "tokenizer" in content else "other data"
        digests.append((difference, recorded["fingerprint"], content["fingerprint"]))
        if "tokenizer" in content:
            digests.append(("another tokenizer", recorded["tokenizer"]["digest"], content["tokenizer"]["digest"]))
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{caller}: {path} cannot be read ({reason}); delete it if the data are the same as before"
        ) from None
    for difference, before, now in digests:
        if before != now:
            name = content["data"]
            raise ValueError(f"{caller}: {path.parent} was begun with {difference} of {name} ({before}, not {now})")


def write(path: pathlib.Path, data: bytes) -> None:
    """Write a file atomically and flush it to disk."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    part.replace(path)
