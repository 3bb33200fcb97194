"""The owner of a run folder: the run that it belongs to, and the process that trains in it now."""

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
from collections.abc import Iterator

from polyhead import config as configs
from polyhead.config import Run
from polyhead.config.extensions import UnknownKind
from polyhead.config.serial import flat
from polyhead.train.stop import HELD
from polyhead.train.store.checkpoint import candidates, read_metadata
from polyhead.train.store.files import check_local, forget, set_aside, write
from polyhead.train.store.folder import BAD_BATCH, CONFIG, DIGEST, RESULT, SENT, read_config, read_result

LOCK = ".lock"
SHOWN = 3
"""How many settings are named in which a run differs from that of its folder."""


class FolderInUse(ValueError):
    """Another process is training in the folder.  `code`: the worker's exit code."""

    code = HELD


@contextlib.contextmanager
def claim(config: Run, folder: pathlib.Path) -> Iterator[None]:
    """A context that locks `folder` for this process and checks that it belongs to the run `config`."""
    check_local("run folder", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run folder: {folder} cannot be made ({error.strerror})") from None
    with locked(folder):
        path, mine = folder / CONFIG, configs.digest(config)
        if (theirs := _holder(folder, mine)) != mine:
            held = f"{folder} already holds another run ({theirs}, not {mine}){_differs(config, folder)}"
            raise ValueError(f"run folder: {held}; choose another folder or delete it")
        values = {DIGEST: mine, **configs.to_dict(dataclasses.replace(config, folder=None))}
        text = json.dumps(values, indent=2) + "\n"
        if not path.exists() or path.read_bytes() != text.encode():
            try:
                _forget_other(folder, mine)
                write(path, text.encode())
            except OSError:
                if not (folder / RESULT).exists():  # a finished run may be in a read-only folder
                    raise
        yield


def _forget_other(folder: pathlib.Path, mine: str) -> None:
    """Delete what another run left in `folder` before its first checkpoint and run `mine` would take for its own."""
    from polyhead.tasks.record import RECORD
    from polyhead.tasks.text import tokens as text_tokens

    with contextlib.suppress(ValueError):
        if (folder / CONFIG).exists() and configs.digest(read_config(folder)) != mine:
            names = (BAD_BATCH, RECORD, text_tokens.FILE)
            for path in [*(folder / name for name in names), *folder.glob(f"*/{SENT}")]:
                forget(path)


def _differs(config: Run, folder: pathlib.Path) -> str:
    """The settings in which `config` differs from the run in `folder`, in words; "" where that cannot be read."""
    try:
        there, here = (flat(configs.to_dict(run, semantic=True)) for run in (read_config(folder), config))
    except ValueError:
        return ""
    names = [name for name in there | here if there.get(name) != here.get(name)]
    told = [f"{name} is {there.get(name)!r} there but {here.get(name)!r} here" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        told.append(f"and {len(names) - SHOWN} more")
    return ": " + ", ".join(told) if told else ""


def _holder(folder: pathlib.Path, mine: str) -> str:
    """The digest of the run in `folder`, or `mine` if nothing was trained, so a corrected run may reuse the folder.

    A damaged config.json is renamed if all other files belong to run `mine`.  Raises ValueError if they do not.
    """
    path, rest = folder / CONFIG, owner(folder)
    try:
        if path.exists() and rest is not None:
            return configs.digest(read_config(folder))
    except UnknownKind:
        raise
    except ValueError as error:
        if rest != mine:
            raise
        set_aside(path, error)
    return rest or mine


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold the folder's lock.  It locks a file: over NFS a lock of a folder is local to one machine."""
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
        with contextlib.suppress(OSError):  # the holder's host name, for messages only
            os.truncate(handle, 0)
            os.pwrite(handle, f"{platform.node()} {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def claimed_by(folder: pathlib.Path) -> str | None:
    """The host whose process trains in `folder` now ("" if unknown), or None if no process does."""
    try:
        import fcntl

        handle = os.open(folder / LOCK, os.O_RDWR)
    except (ImportError, OSError):  # no lock file, or a system without locks
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(handle, 256, 0).decode(errors="replace").partition(" ")[0]
    finally:
        os.close(handle)
    return None


def owner(folder: pathlib.Path) -> str | None:
    """The digest of the run that was trained in `folder`: "" if it is unreadable, None if there was none."""
    found = candidates(folder)
    for path in found:
        with contextlib.suppress(ValueError):
            if path.is_dir():
                from polyhead.train.store.sharded import read_index

                return str(read_index(path)["digest"])
            return str(read_metadata(path)["digest"])
    with contextlib.suppress(ValueError):
        if (result := read_result(folder)) is not None:
            return result.digest
        return "" if found else None
    return ""
