"""The output of a command: text, or JSON with --json; without progress with --quiet."""

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator

from polyhead.train.progress import QUIET

FLAGS = ("--json", "--quiet")
_ASKED: set[str] = set()


@contextlib.contextmanager
def asked(flags: set[str]) -> Iterator[None]:
    """A context in which commands print as `flags` say; processes that they start are also quiet."""
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


@contextlib.contextmanager
def short_warnings() -> Iterator[None]:
    """A context in which a warning of ours is one line, without its place in the code."""
    plain = warnings.formatwarning

    def short(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        ours = category.__module__.startswith("polyhead")
        return f"polyhead: {message}\n" if ours else plain(message, category, filename, lineno, line)

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = plain


def taken(arguments: list[str]) -> set[str]:
    """Remove the flags of `FLAGS` from `arguments` and return them."""
    found = {word for word in arguments if word in FLAGS}
    arguments[:] = [word for word in arguments if word not in FLAGS]
    return found


def emit(value: Callable[[], object], show: Callable[[], None]) -> None:
    """Print a result: as JSON with --json, else by `show`."""
    if "--json" in _ASKED:
        from polyhead.config.serial import legal  # here: without --json, `polyhead list` starts faster

        print(json.dumps(legal(value()), indent=1, default=str))
    else:
        show()
