"""The command line.  dispatch.py has the list of commands; output.py prints."""

from polyhead.cli.dispatch import main as main

__all__ = ["main"]
