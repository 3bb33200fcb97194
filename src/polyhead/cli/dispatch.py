"""The command line.  An error is one line on standard error and exit code 2; Ctrl-C saves and gives exit code 130."""

import argparse
import contextlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union

from polyhead.cli import demo, generate, listing, reproduce, runs, sweep, train
from polyhead.cli.output import discard_output, printing, write_error
from polyhead.train.messages import describe_os_error, safe_error_stream
from polyhead.train.stop import INTERRUPTED, Interrupted, leaving

VERBS: dict[str, Callable[..., int]] = {
    "demo": demo.demo,
    "train": train.train,
    "sweep": sweep.sweep,
    "reproduce": reproduce.reproduce,
    "resume": train.resume,
    "eval": runs.evaluate,
    "probe": runs.probe,
    "report": runs.report,
    "explore": runs.explore,
    "list": listing.list_all,
    "generate": generate.generate,
}
"""Name on the command line -> function.  Its parameters are the options, its docstring is the help."""

OF_RECIPES = {"train": train.main, "sweep": sweep.main}
"""The verbs whose further options are the fields of a recipe."""

DESCRIPTION = """Multi-head attention: train it, compare it, look inside.

Every command takes --json (print the result as JSON), --quiet (no progress) and --import MODULE (import a module first,
with the tasks and recipes that it registers)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    # Common options may stand before the verb.
    trains = not {"train", "resume", "sweep", "reproduce"}.isdisjoint(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console without "²" shows "?"; standard error escapes it
    with safe_error_stream(), leaving() if trains else contextlib.nullcontext():
        try:
            code = _run(argv)
            sys.stdout.flush()
            return code
        except Interrupted as stop:
            return write_error(str(stop), stop.code)
        except KeyboardInterrupt:
            return write_error("interrupted", INTERRUPTED)
        except ValueError as error:
            return write_error(str(error), 2)
        except BrokenPipeError:  # only results are printed on standard output: polyhead list recipes | head -1
            discard_output()
            return 0
        except OSError as error:
            return write_error(describe_os_error(error), 1)


def _run(arguments: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="polyhead", add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--json", action="store_true")
    options.add_argument("--quiet", action="store_true")
    options.add_argument("--import", action="append", default=[], dest="modules", metavar="MODULE")
    try:
        common, words = options.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"polyhead: {error}") from None
    if common.modules:
        from polyhead.extensions import bring

        bring(common.modules)
    with printing(common.json, common.quiet):
        try:
            return _call(words)
        except SystemExit as end:  # after --help, and after a box about a wrong option
            return int(end.code or 0)


def _call(words: list[str]) -> int:
    import tyro

    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():  # boxes about wrong options are printed there
        tyro._experimental_options["ansi_codes"] = False
    if words == ["--version"]:
        from polyhead import __version__

        print(__version__)
        return 0
    name = next(iter(words), "")
    # The options depend on the recipe, so it is read before tyro parses the other words.
    if name in OF_RECIPES and len(words) > 1 and not words[1].startswith("-"):
        return OF_RECIPES[name](words[1], words[2:])
    if name in VERBS:
        return tyro.cli(VERBS[name], args=words[1:], prog=f"polyhead {name}")
    # Nothing, --help, an unknown command, or a script that completes commands in a shell.
    commands = []
    for name, verb in VERBS.items():
        summary = (inspect.getdoc(verb) or "").partition("\n")[0]  # empty if Python was started with -OO
        commands.append(Annotated[Any, tyro.conf.subcommand(name, constructor=verb, description=summary)])
    any_command: Any = Union[tuple(commands)]  # noqa: UP007 (there is no other spelling for a list of types)
    tyro.cli(any_command, prog="polyhead", description=DESCRIPTION, args=words)
    return 2
