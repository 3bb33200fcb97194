"""The command line.  Start with dispatch.py; verbs.py says where each verb is; text.py prints tables."""

import sys
from collections.abc import Sequence

from polyhead.spec.optional import DISTRIBUTIONS

CORE = ("einops", "jaxtyping", "numpy", "rich", "safetensors", "torch", "tyro", "yaml")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.  Without a package of the core, one line names it."""
    try:
        from polyhead.cli.dispatch import main as run

        return run(argv)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in CORE:
            raise
        print(f"polyhead needs {DISTRIBUTIONS.get(package, package)}: pip install 'polyhead'", file=sys.stderr)
        return 1


__all__ = ["main"]
