"""A run folder belongs to one run, and one process at a time trains in it."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator

from polyhead import config as configs
from polyhead.config import Run
from polyhead.config.serial import flat
from polyhead.train.stop import HELD
from polyhead.train.store.checkpoint import check_digest, checkpoints, read_metadata
from polyhead.train.store.files import check_local, delete, write
from polyhead.train.store.folder import CONFIG, DIGEST, RESULT, checkpoint_files, read_config

LOCK = ".lock"
NUM_SHOWN = 3
"""How many settings are named in which a run differs from that of its folder."""


class FolderInUse(ValueError):
    """Another process is training in the folder.  `code`: the worker's exit code."""

    code = HELD


@contextlib.contextmanager
def claim(config: Run, folder: pathlib.Path) -> Iterator[None]:
    """A context that locks `folder` for this process and writes the configuration of its run.

    Raises FolderInUse, and ValueError if the folder belongs to another run.
    """
    check_local("run folder", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run folder: {folder} cannot be made ({error.strerror})") from None
    with _locked(folder):
        path, digest = folder / CONFIG, configs.digest(config)
        if path.exists():
            _check_owner(config, folder, digest)
        else:  # lost, or not written yet
            for checkpoint in checkpoints(folder)[:1]:
                check_digest(checkpoint, read_metadata(checkpoint), digest)
        values = {DIGEST: digest, **configs.to_dict(dataclasses.replace(config, folder=None))}
        data = (json.dumps(values, indent=2) + "\n").encode()
        if not path.exists() or path.read_bytes() != data:
            try:
                write(path, data)
            except OSError:
                if not (folder / RESULT).exists():  # a finished run may be in a read-only folder
                    raise
        yield


def _check_owner(config: Run, folder: pathlib.Path, digest: str) -> None:
    """Raise a ValueError if another run was trained in the folder.  A run that never trained leaves the folder free."""
    is_trained = bool(checkpoint_files(folder)) or (folder / RESULT).exists()
    try:
        other = read_config(folder)
    except ValueError:
        if is_trained:
            raise
        return
    other_digest = configs.digest(other)
    if other_digest == digest:
        return
    if is_trained:
        differences = _differences(other, config)
        raise ValueError(
            f"run folder: {folder} already holds another run ({other_digest}, not {digest}){differences}; "
            "choose another folder or delete it"
        )
    # The data files of the other run would be taken for those of this one.
    from polyhead.tasks.record import RECORD
    from polyhead.tasks.text import tokens as text_tokens

    delete(folder / RECORD)
    delete(folder / text_tokens.FILE)


def _differences(other: Run, config: Run) -> str:
    """The settings in which `config` differs from the run of its folder, in words."""
    before = flat(configs.to_dict(other, semantic=True))
    after = flat(configs.to_dict(config, semantic=True))
    texts = []
    for name in before | after:
        if before.get(name) != after.get(name):
            texts.append(f"{name} is {before.get(name)!r} there but {after.get(name)!r} here")
    if len(texts) > NUM_SHOWN:
        texts[NUM_SHOWN:] = [f"and {len(texts) - NUM_SHOWN} more"]
    return ": " + ", ".join(texts) if texts else ""


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process dies.

    The lock is on a file: over NFS, a lock of a folder holds on one machine only.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        yield
        return
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # a finished run may be in a read-only folder
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(f"run folder: another process is training in {folder}") from None
        yield
    finally:
        os.close(handle)


def is_claimed(folder: pathlib.Path) -> bool:
    """Is a process training in `folder` now?"""
    try:
        import fcntl

        handle = os.open(folder / LOCK, os.O_RDWR)
    except (ImportError, OSError):  # no lock file, or a system without locks
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
