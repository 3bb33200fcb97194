"""The output of a command: its result for a person, or with --json for a program; with --quiet no progress."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator

from polyhead.train.progress import QUIET

FLAGS = ("--json", "--quiet")
_ASKED: set[str] = set()


@contextlib.contextmanager
def asked(flags: set[str]) -> Iterator[None]:
    """Commands within it print as `flags` say; processes that they start are quiet, too."""
    before = os.environ.get(QUIET)
    _ASKED.update(flags)
    if "--quiet" in flags:
        os.environ[QUIET] = "1"
    try:
        yield
    finally:
        _ASKED.clear()
        if "--quiet" in flags:
            os.environ.pop(QUIET)
        if before is not None:
            os.environ[QUIET] = before


def taken(arguments: list[str]) -> set[str]:
    """The flags of `FLAGS` among `arguments`, from which they are taken out."""
    found = {word for word in arguments if word in FLAGS}
    arguments[:] = [word for word in arguments if word not in FLAGS]
    return found


def emit(value: Callable[[], object], show: Callable[[], None]) -> None:
    """Print a result: as JSON where --json was given, else as `show` does."""
    if "--json" in _ASKED:
        print(json.dumps(_plain(value()), indent=1, default=str))
    else:
        show()


def _plain(value: object) -> object:
    """Numbers that JSON lacks, infinite or not a number, are null."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
