"""Shared definitions: the letters of shapes, the table of mechanisms, one mapping of parameter trees.

Imports neither torch nor jax.  `polyhead.spec.NAME` comes from the table (table.py) when it is first used: the command
line needs the table for few commands.  shapes.py checks sizes.
"""

import importlib
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyhead.spec.table import *  # noqa: F403
    from polyhead.spec.table import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        table = importlib.import_module("polyhead.spec.table")
        if name == "Mechanism":
            name = "MechanismRow"
            warnings.warn(f"polyhead.spec.Mechanism is polyhead.spec.{name} now", DeprecationWarning, stacklevel=2)
        if name == "__all__" or name in table.__all__:
            return getattr(table, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(importlib.import_module("polyhead.spec.table").__all__)
