"""Processes forked from this one: a new Python process would take seconds for its imports.

A `Process` is called like subprocess.Popen and has the methods that tests need.  It only supports
`python -c CODE WORD ...` and `python -m polyhead.train WORD ...`.  Tests of imports and command lines start new
processes instead.  Only one thread may start forked processes.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any


class Process(subprocess.Popen[bytes]):
    _child_created, _sigint_wait_secs = False, 0.0  # read by the base class, which so leaves the child alone

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Any = None,
        stdout: IO[Any],
        stderr: IO[Any],
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args, self.returncode, self._waitpid_lock = command, None, threading.Lock()
        assert threading.current_thread() is threading.main_thread(), "a copy made beside another may never begin"
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # JAX warns of every fork
            self.pid = os.fork()
        if not self.pid:
            if start_new_session:
                os.setsid()
            for descriptor, file in ((1, stdout), (2, stderr)):
                os.dup2(file.fileno(), descriptor)
            self.begin()
            _live(command, env, self.end)

    def begin(self) -> None:
        """In the child, before its work."""

    def end(self) -> None:
        """In the child, after its work."""


def _live(command: Sequence[str], env: Mapping[str, str] | None, end: Callable[[], None]) -> None:
    """All of a child's life; does not return."""
    code: Any = 1
    try:
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        warnings.simplefilter("ignore")
        os.environ.update(env or {})
        _, how, what, *words = [word for word in command if word != "-P"]
        sys.argv = [how, *words]
        if how == "-c":
            exec(compile(what, "<forked>", "exec"), {"__name__": "__main__"})
        else:
            assert (how, what) == ("-m", "polyhead.train"), command
            from polyhead.train.__main__ import main

            sys.exit(main(words))
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            end()
        finally:
            os._exit(code)  # or the child would go on with the tests of its parent


INSTEAD = types.SimpleNamespace(Popen=Process, DEVNULL=subprocess.DEVNULL)
"""In place of a module's `subprocess`."""


def run(code: str, *words: object) -> tuple[int, str]:
    """The exit code of `python -c CODE WORD ...` (below 0: the signal) and all that it said."""
    with tempfile.TemporaryFile("w+") as said:
        process = Process([sys.executable, "-c", code, *map(str, words)], stdout=said, stderr=said)
        code_of_it = process.wait()
        said.seek(0)
        return code_of_it, said.read()
