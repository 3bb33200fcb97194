"""Python processes of their own, beside that of the tests."""

import os
import subprocess
import sys


class Process(subprocess.Popen):
    """A process with further environment variables."""

    def __init__(self, command, *, env=None, **options):
        super().__init__(command, env={**os.environ, **(env or {})}, **options)


def run(code, *words):
    """The exit code of `python -c CODE WORD ...` (below 0: the signal) and all that it printed."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, words)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return process.returncode, process.stdout
