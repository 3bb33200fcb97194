"""Types of options that several commands share, and the parser for the fields of a run."""

import contextlib
import io
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

Parsed = TypeVar("Parsed")

RUN_HELP = "A run folder, or a trained model of `polyhead list models`."
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help=RUN_HELP)]
RunFolders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
Device = Annotated[str, tyro.conf.arg(help="auto, cpu, cuda or mps.")]


def parse_fields(default: Parsed, words: list[str], prog: str, description: str) -> Parsed:
    """Return `default` with the fields that `words` change; --help prints all fields and exits.

    A wrong option is explained by tyro, which exits with 2.  Raises ValueError if a configuration refuses a value.
    """
    markers: Any = (tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff)
    errors = io.StringIO()
    try:
        # tyro prints its box before we know the cause; it is held back, because a refused value gets one line.
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                type(default), default=default, args=words, prog=prog, description=description, config=markers
            )
    except SystemExit as end:
        refusal = _refusal(end)
        if refusal is not None:
            raise ValueError(refusal) from None
        sys.stderr.write(errors.getvalue())
        raise


def _refusal(end: SystemExit) -> str | None:
    """The message of the configuration that refused a value, which tyro wraps in a box; None for tyro's own errors."""
    error = end.__context__
    while error is not None:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, ValueError) and "__post_init__" in functions:
            return str(error)
        error = error.__cause__ or error.__context__
    return None
