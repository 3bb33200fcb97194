"""What commands print: tables, lines and errors, or JSON with --json.

Everything passes `escape`, because names and messages may come from a stranger's file.
"""

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from polyhead.spec.values import one_line
from polyhead.train.messages import escape, print_notice
from polyhead.train.progress import QUIET

WIDTH = 120
"""Columns of a table if the output is no terminal."""
LEAST_WIDTH = 40
"""Columns below which the layout of help and tables does not work."""

Row = Mapping[str, Any]


SETTINGS = {"json": False}
"""How the commands of this process print."""


# --------------------------------------------------------------------------------------------------- how commands print
@contextmanager
def printing(json: bool, quiet: bool) -> Iterator[None]:
    """A context in which commands print JSON or text, and no progress if `quiet`, also in processes they start.

    A warning of this package is one line.  A terminal narrower than 40 columns counts as 40 wide.
    """
    before, format_before = dict(os.environ), warnings.formatwarning
    # Environment variables, because worker processes inherit them.
    if quiet:
        os.environ[QUIET] = "1"
    if shutil.get_terminal_size().columns < LEAST_WIDTH:
        os.environ["COLUMNS"] = str(LEAST_WIDTH)

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category.__module__.startswith("polyhead"):
            return f"polyhead: {escape(str(message))}\n"
        return format_before(message, category, filename, lineno, line)

    SETTINGS["json"], warnings.formatwarning = json, format_warning
    try:
        yield
    finally:
        SETTINGS["json"], warnings.formatwarning = False, format_before
        os.environ.clear()
        os.environ.update(before)


def write(text: str) -> None:
    """Print lines on standard output."""
    print(escape(text))


def write_error(text: str, code: int) -> int:
    """Print one line on standard error, and return the exit code."""
    line = one_line(text)
    if not line.startswith("polyhead"):
        line = f"polyhead: {line}"
    print_notice(line)
    return code


def emit(value: object, show: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Print a result: `value` as JSON with --json, else by `show(*arguments, **options)`.

    If nobody reads it, as behind `| head -1`, the command goes on and keeps its exit code.
    """
    from polyhead.spec.values import legal

    try:
        if SETTINGS["json"]:
            print(json.dumps(legal(value), indent=1, default=str))
        else:
            show(*arguments, **options)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Send standard output to nowhere, so that nothing more fails on a pipe that nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_table(title: str, rows: Sequence[Row], note: str = "") -> None:
    """Print `rows` as a table with a note below it; their keys are the columns."""
    from rich.console import Console
    from rich.table import Table

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1

    table = Table(title=escape(title), title_justify="left")
    # Columns of numbers are aligned at the right.
    for name in next(iter(rows), {}):
        is_number = all(isinstance(row[name], (int, float)) for row in rows)
        table.add_column(escape(str(name)), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        cells = list(map(_cell, row.values()))
        table.add_row(*cells)
        table.show_lines |= "\n" in "".join(cells)  # cells of several lines need rules between the rows
    width = None if sys.stdout.isatty() else WIDTH
    Terminal(width=width, markup=False, highlight=False, emoji=False).print(table)
    if note:
        write(note)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return escape(str(value))
