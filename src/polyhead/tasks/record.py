"""data.json in a run's folder: which data the run was begun with, so that it cannot resume with others unnoticed."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import IO, Any

from torch import Tensor

RECORD = "data.json"


def fingerprint(parts: Iterable[Tensor | str]) -> str:
    """A hash of tensors and texts, in their order.  Tensors on any device; their values, dtypes and shapes count."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = part if isinstance(part, str) else f"{part.dtype} {tuple(part.shape)}"
        total.update(f"{len(text.encode())} {text}".encode())
        if isinstance(part, Tensor):
            total.update(memoryview(part.cpu().contiguous().numpy()).cast("B") if part.numel() else b"")
    return total.hexdigest()


def keep(who: str, folder: str | os.PathLike[str], about: Mapping[str, Any]) -> None:
    """Write `about` to `folder`/data.json: "data", its name; its "fingerprint"; for text, "tokenizer" and its "digest".

    Raises ValueError if the file says that the run in the folder was begun with other data or another tokenizer.
    """
    root, path, mine = pathlib.Path(folder), pathlib.Path(folder) / RECORD, _identity(about)
    if path.exists():
        try:
            before = _identity(json.loads(path.read_bytes()))
            known = {what: before[what] for what in mine}
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            way_on = f"delete it if the {next(iter(mine))} is the same as before"
            raise ValueError(f"{who}: {path} cannot be read ({' '.join(str(error).split())}); {way_on}") from None
        for what, now in mine.items():
            if known[what] != now:
                then = f"another {what} of {about['data']} ({known[what]}, not {now})"
                raise ValueError(f"{who}: {root} was begun with {then}")
    write(path, json.dumps(about, indent=2).encode() + b"\n")


def _identity(about: Mapping[str, Any]) -> dict[str, str]:
    """What must stay the same, by its name in messages."""
    if "tokenizer" in about:
        return {"text": str(about["fingerprint"]), "tokenizer": str(about["tokenizer"]["digest"])}
    return {"data": str(about["fingerprint"])}


def write(path: pathlib.Path, data: bytes) -> None:
    """Write a file atomically and flush it to disk."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as handle:
        handle.write(data)
        sync(handle)
    part.replace(path)


def sync(handle: IO[bytes]) -> None:
    """Flush an open file to disk."""
    handle.flush()
    os.fsync(handle.fileno())
