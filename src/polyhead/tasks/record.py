"""data.json in a run's folder: which data the run was begun with, so that it cannot resume with others unnoticed."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import IO

from torch import Tensor

RECORD = "data.json"
Folder = str | os.PathLike[str]


def fingerprint(parts: Iterable[Tensor | str]) -> str:
    """A hash of tensors and texts, in their order.  Tensors on any device; their values, dtypes and shapes count."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = part if isinstance(part, str) else f"{part.dtype} {tuple(part.shape)}"
        total.update(f"{len(text.encode())} {text}".encode())
        if isinstance(part, Tensor):
            total.update(part.cpu().numpy().tobytes())
    return total.hexdigest()


def keep(
    caller: str, folder: Folder, data: str, found: str, text: Mapping[str, Mapping[str, object]] | None = None
) -> None:
    """Write the name `data` and the fingerprint `found` to `folder`/data.json, and all of `text`.

    text: of a text, its "tokenizer", which has a "digest", and its "splits".
    Raises ValueError if the file says that the run in the folder was begun with other data or another tokenizer.
    """
    root, path = pathlib.Path(folder), pathlib.Path(folder) / RECORD
    recorded = {"data": found} if text is None else {"text": found, "tokenizer": text["tokenizer"]["digest"]}
    if path.exists():
        try:
            before = json.loads(path.read_bytes())
            known = [before["fingerprint"], *([] if text is None else [before["tokenizer"]["digest"]])]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            way_on = f"delete it if the {'data are' if text is None else 'text is'} the same as before"
            raise ValueError(f"{caller}: {path} cannot be read ({' '.join(str(error).split())}); {way_on}") from None
        for (part, now), then in zip(recorded.items(), known, strict=True):
            if then != now:
                other = "other data" if part == "data" else f"another {part}"
                raise ValueError(f"{caller}: {root} was begun with {other} of {data} ({then}, not {now})")
    about = {"data": data, "fingerprint": found, **(text or {})}
    write(path, json.dumps(about, indent=2).encode() + b"\n")


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
