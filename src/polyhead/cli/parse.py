"""Parses arguments into dataclasses with tyro; its boxed errors become one line."""

import contextlib
import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from polyhead.cli.mistakes import one_line

Parsed = TypeVar("Parsed")
RUN = "A run folder, or a trained model of `polyhead list models`."
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help=RUN)]
Device = Annotated[str, tyro.conf.arg(help="auto, cpu, cuda or mps.")]
Deterministic = Annotated[bool, tyro.conf.arg(help="Deterministic algorithms only.")]


def help_text(kind: Any) -> str:
    """The docstring of a verb as help text: `>>>` lines are examples."""
    lines = [line.strip() for line in kind.__doc__.strip().splitlines()]
    text = [line for line in lines if not line.startswith(">>>")]
    examples = ["  " + line.removeprefix(">>> ") for line in lines if line.startswith(">>>")]
    return "\n".join([*text, "examples:", *examples])


def parse(kind: Callable[..., Parsed], arguments: list[str], prog: str, text: str, default: Any = None) -> Parsed:
    """`arguments` parsed as a `kind`; --help prints and exits.  Raises ValueError with one line."""
    options: dict[str, Any] = {"prog": prog, "description": text, "args": arguments}
    options |= {"config": (tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff)}
    options |= {} if default is None else {"default": default}
    read = functools.partial(tyro.cli, kind, **options)
    if {"-h", "--help"} & set(arguments):
        return read()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read()
    except SystemExit:
        raise ValueError(one_line(said.getvalue(), prog, arguments, lambda: _options(read))) from None


def _options(read: Callable[..., object]) -> list[str]:
    """The options that a command takes, from its help."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        read(args=["--help"])
    return re.findall(r"--[a-z][\w.-]*", re.sub(r"\x1b\[[0-9;]*m", "", told.getvalue()))
