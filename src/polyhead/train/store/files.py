"""Files that are whole at every moment and that are read back as they were written, or not at all."""

import contextlib
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from polyhead.train.store.disk import tell

DAMAGED = ".damaged"
SEAL = "seal"


class Damaged(ValueError):
    """A file does not hold what was written into it."""


# --------------------------------------------------------------------------------------------------------------- whole
def write(path: pathlib.Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: after a crash or on a full disk the old file is whole.  Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    with named(path):
        try:
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
    sync_folder(path.parent)


@contextlib.contextmanager
def named(path: pathlib.Path) -> Iterator[None]:
    """An OSError in here says which file could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path}: cannot be written ({error.strerror})") from None


def link(source: pathlib.Path, target: pathlib.Path) -> None:
    """Make `target` another name of the file `source`, in one step; a copy where a file has one name only."""
    partial = target.with_name(target.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        os.link(source, partial)
    except OSError:
        with named(target):
            data = source.read_bytes()
        write(target, data)
        return
    with named(target):
        os.replace(partial, target)
        partial.unlink(missing_ok=True)  # it stays when both were the same file before
    sync_folder(target.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """What was renamed in it stays so after a power cut."""
    with contextlib.suppress(OSError):  # not every system can open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def set_aside(path: pathlib.Path, why: object) -> None:
    """Rename a damaged file, or folder, and say so: nothing is lost, and nothing goes on with it."""
    aside = path.with_name(path.name + DAMAGED)
    forget(aside)
    os.replace(path, aside)
    tell(f"{why}; set aside as {aside.name}")


def forget(path: pathlib.Path) -> None:
    """Delete a file, or a folder, if it is there."""
    with named(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- as written
def seal(values: dict[str, Any]) -> dict[str, Any]:
    """JSON values with a checksum of their text: a flipped bit must not pass for a score.

    >>> seal({"step": 8})
    {'step': 8, 'seal': 3947178612}
    """
    return {**values, SEAL: zlib.crc32(json.dumps(values).encode())}


def unseal(values: Any, where: object) -> dict[str, Any]:
    """The inverse of `seal`; values that were never sealed are taken as they are.  Raises Damaged, beginning with
    `where`."""
    if not isinstance(values, dict):
        raise Damaged(f"{where} is damaged (a table was wanted but {str(values)[:40]!r} came)")
    plain = {name: value for name, value in values.items() if name != SEAL}
    try:
        right = SEAL not in values or values[SEAL] == seal(plain)[SEAL]
    except RecursionError:  # nobody has written that
        right = False
    if not right:
        raise Damaged(f"{where} is damaged (its contents do not match their checksum)")
    return plain


def checksum(tensors: dict[str, torch.Tensor]) -> int:
    """Safetensors checks sizes only; a flipped bit must not pass for a parameter."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), value))
    return value
