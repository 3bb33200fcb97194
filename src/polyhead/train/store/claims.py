"""A run folder belongs to one run, and one process at a time trains in it."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator

from filelock import FileLock, Timeout

from polyhead import config as configs
from polyhead.config import Run
from polyhead.config.serial import flat
from polyhead.train.stop import HELD
from polyhead.train.store.checkpoint import check_digest, checkpoints, read_metadata
from polyhead.train.store.files import check_local, delete, write
from polyhead.train.store.folder import CONFIG, DIGEST, RESULT, checkpoint_files, data_files, read_config

LOCK = ".lock"
PATIENCE = 0.5
"""Seconds to wait for the lock, which a process that only looks holds for an instant."""


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
        before = flat(configs.to_dict(other, semantic=True))
        after = flat(configs.to_dict(config, semantic=True))
        names = sorted(name for name in before | after if before.get(name) != after.get(name))
        text = f"({other_digest}, not {digest}), which differs in {', '.join(names[:3])}; choose another folder"
        raise ValueError(f"run folder: {folder} already holds another run {text}")
    # The data files of the other run would be taken for those of this one.
    for path in data_files(folder):
        delete(path)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process dies."""
    lock = FileLock(folder / LOCK, timeout=PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUse(f"run folder: another process is training in {folder}") from None
    except OSError:
        if not (folder / RESULT).exists():  # a finished run may be in a read-only folder
            raise
    try:
        yield
    finally:
        lock.release()


def is_claimed(folder: pathlib.Path) -> bool:
    """Is a process training in `folder` now?"""
    try:
        import fcntl
    except ImportError:  # Windows
        return _is_locked(folder)
    try:
        with open(folder / LOCK, "rb") as file:
            # A shared lock: those who only look do not see one another.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a folder of another user, which nobody trains in here
        return False
    return False


def _is_locked(folder: pathlib.Path) -> bool:
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False
