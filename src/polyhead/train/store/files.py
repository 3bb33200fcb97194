"""Files are written atomically, and checked for damage when they are read."""

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save

from polyhead.train.messages import print_notice

DAMAGED = ".damaged"
SEAL = "seal"


class Damaged(ValueError):
    """The contents of a file differ from what was written."""


# --------------------------------------------------------------------------------------------------------------- whole
def write(path: pathlib.Path, data: bytes) -> None:
    """Replace `path` by `data` atomically: a crash or a full disk leaves the old file complete.  Raises OSError."""
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
    """A context that adds `path` to the text of an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path}: cannot be written ({error.strerror})") from None


def check_local(who: str, path: pathlib.Path) -> None:
    """Raise a ValueError for a URL such as s3://bucket/run: `path` would be a folder s3: of this one."""
    if re.fullmatch(r"[^/\\]{2,}:", path.parts[0] if path.parts else ""):  # C: is a drive
        raise ValueError(f"{who}: a path of this machine was wanted but the URL {path} came")


def check_place(who: str, path: pathlib.Path, *, renamed: bool = True) -> None:
    """Raise a ValueError, before the work, if the file `path` cannot be written; its folder is made.

    `renamed`: it is written beside its place, as by `write`, which needs a folder that can be written.
    """
    check_local(who, path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if renamed or not path.exists():
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise ValueError(f"{who}: {path} cannot be written ({error.strerror})") from None


def check_folder(who: str, folder: pathlib.Path) -> None:
    """Raise a ValueError, before the work, if nothing can be written into `folder`; it is made."""
    check_local(who, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{who}: {folder} cannot be written ({error.strerror})") from None


def link(source: pathlib.Path, target: pathlib.Path) -> None:
    """Make `target` a hard link to `source`, atomically; a copy where the file system has no hard links."""
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
        partial.unlink(missing_ok=True)  # rename keeps it if both names were the same file
    sync_folder(target.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Make renames in the folder durable against a power cut."""
    with contextlib.suppress(OSError):  # not every system can open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def set_aside(path: pathlib.Path, why: object) -> None:
    """Rename a damaged file or folder and print why: it is kept, but no longer used."""
    aside = path.with_name(path.name + DAMAGED)
    forget(aside)
    os.replace(path, aside)
    print_notice(f"{why}; set aside as {aside.name}")


def forget(path: pathlib.Path) -> None:
    """Delete a file or folder if it exists."""
    with named(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- as written
def seal(values: dict[str, Any]) -> dict[str, Any]:
    """JSON values with a checksum of their text, so that a flipped bit is noticed.

    >>> seal({"step": 8})
    {'step': 8, 'seal': 3947178612}
    """
    return {**values, SEAL: zlib.crc32(json.dumps(values).encode())}


def unseal(values: Any, where: object) -> dict[str, Any]:
    """The inverse of `seal`; values without a checksum are returned unchanged.  Raises Damaged, which names `where`."""
    if not isinstance(values, dict):
        raise Damaged(f"{where} is damaged (a table was wanted but {str(values)[:40]!r} came)")
    plain = {name: value for name, value in values.items() if name != SEAL}
    try:
        right = SEAL not in values or values[SEAL] == seal(plain)[SEAL]
    except RecursionError:  # nested too deeply: not written by `seal`
        right = False
    if not right:
        raise Damaged(f"{where} is damaged (its contents do not match their checksum)")
    return plain


def packed(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> bytes:
    """A safetensors file with sealed metadata, which hold the checksum of the tensors."""
    return save(tensors, {"polyhead": json.dumps(seal({**metadata, "checksum": checksum(tensors)}))})


def one_line(error: object) -> str:
    """The text of an error of another library, in one line."""
    return " ".join(str(error).split())


def checksum(tensors: dict[str, torch.Tensor]) -> int:
    """The checksum of `tensors`: safetensors checks only sizes, so it would miss a flipped bit."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), value))
    return value
