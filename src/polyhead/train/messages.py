"""Notices on standard error.  Output never decides a run: a closed pipe, a lost terminal and a full log are ignored."""

import contextlib
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any


def escape(text: str) -> str:
    """`text` with control characters written as escapes; line ends and tabs stay.

    >>> escape("red \\x1b[31m, an end\\n")
    'red \\\\x1b[31m, an end\\n'
    """
    characters = []
    for character in text:
        is_control = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        if is_control and character not in "\n\t":
            character = repr(character)[1:-1]
        characters.append(character)
    return "".join(characters)


def print_notice(text: str) -> None:
    """Print a notice on standard error, escaped; do nothing where it cannot be written."""
    if sys.stderr is None:  # the process was started with `2>&-`
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
        print(escape(text), file=sys.stderr, flush=True)


def write_notice(text: str) -> None:
    """Print one line on standard error from a signal handler.

    The signal may have interrupted a write to `sys.stderr`, which cannot be entered twice: the descriptor can.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{escape(text)}\n".encode())


def describe_os_error(error: OSError) -> str:
    """The text of an OSError in one line, with the file if the error names one."""
    text = error.strerror or str(error)
    if error.filename is None:
        return text
    return f"{error.filename}: {text}"


class SafeStream:
    """A text stream whose writes never raise, for messages of other libraries."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


@contextlib.contextmanager
def safe_error_stream() -> Iterator[None]:
    """A context in which nothing that is written to standard error raises, also where the stream is closed."""
    # The files of a run must not get the numbers of closed streams: another library's message would be written there.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    original_out, original_error = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        sys.stdout = original_out or nothing
        sys.stderr = SafeStream(original_error or nothing)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = original_out, original_error
