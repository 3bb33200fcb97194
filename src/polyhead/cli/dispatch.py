"""The command line.  An error is one line on standard error and exit code 2; Ctrl-C saves and gives exit code 130.

A verb is imported when it runs, and it imports most modules then, so that `polyhead --help` is quick.
"""

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from polyhead.cli.output import asked, short_warnings, taken
from polyhead.cli.text import say
from polyhead.cli.verbs import VERBS
from polyhead.spec.shapes import one_of
from polyhead.train.messages import describe_os_error, safe_error_stream
from polyhead.train.stop import INTERRUPTED, Interrupted, Preempted, leaving, requeue

EXAMPLES = """\
every command:
  --json             print the result as JSON
  --quiet            no progress
  --import MODULE    import MODULE first, with the tasks and recipes that it registers

examples:
  polyhead demo                                      train and compare heads on two tasks, write a report
  polyhead train fuzzy-hyla --seed 1 --train.lr 3e-3
  polyhead eval runs/fuzzy-hyla-1a2b3c4d5e6f
  polyhead train my-recipe --import my_module        with tasks and recipes of your own"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    trains = bool(arguments) and arguments[0] in ("train", "resume", "sweep")
    with safe_error_stream(), leaving() if trains else contextlib.nullcontext():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console without "²" shows "?"; standard error escapes it
    try:
        if modules := _modules(arguments):
            from polyhead.config.extensions import bring

            bring(modules)
        with asked(taken(arguments)), short_warnings():
            return _answer(arguments)
    except Interrupted as stop:
        goes_on = arguments[0] in ("resume", "sweep") and "--again" not in arguments  # the same command resumes
        code = say(str(stop), stop.code)
        again = requeue() if isinstance(stop, Preempted) and goes_on else ""
        return say(again, code) if again else code
    except KeyboardInterrupt:
        return say("interrupted", INTERRUPTED)
    except ValueError as error:
        return say(str(error), 2)
    except BrokenPipeError:  # polyhead list recipes | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return say(describe_os_error(error), 1)


def _modules(arguments: list[str]) -> list[str]:
    """The modules of every `--import MODULE`, which is removed from `arguments`."""
    found = []
    while (at := next((i for i, x in enumerate(arguments) if x.partition("=")[0] == "--import"), None)) is not None:
        _, given, module = arguments.pop(at).partition("=")
        if not given and at == len(arguments):
            raise ValueError("polyhead: --import needs the name of a module")
        found.append(module if given else arguments.pop(at))
    return found


def _answer(arguments: list[str]) -> int:
    """Run one command and write all that it printed: a pipe that is closed is noticed here."""
    try:
        code = _dispatch(arguments)
    except SystemExit as leave:  # --help
        code = int(leave.code or 0)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from polyhead import __version__

        print(__version__)
        return 0
    name, rest = one_of("polyhead", "command", arguments[0], VERBS), arguments[1:]
    verb, prog = VERBS[name].load(), f"polyhead {name}"
    from polyhead.cli.parse import help_text, parse

    if isinstance(verb, type):
        return parse(verb, rest, prog, help_text(verb))()
    if not rest:
        raise ValueError(f"{prog}: RECIPE is missing; see polyhead list recipes")
    if rest[0] not in ("-h", "--help"):
        return verb(rest)
    print(f"usage: {prog} RECIPE [--field value ...]\n\n{help_text(verb)}")
    return 0


def _overview() -> str:
    verbs = [f"  {name:<11}{verb.line}" for name, verb in VERBS.items()]
    head = "usage: polyhead COMMAND ...      polyhead COMMAND --help explains one"
    return "\n".join([head, "", "Multi-head attention: train it, compare it, look inside.", "", *verbs, "", EXAMPLES])
