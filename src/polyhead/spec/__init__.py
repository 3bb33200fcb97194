"""Shared definitions: the letters of shapes, the table of mechanisms, one mapping of parameter trees.

Imports neither torch nor jax.  `polyhead.spec.NAME` comes from the table (table.py); shapes.py checks sizes.
"""

from polyhead.spec.table import *  # noqa: F403
from polyhead.spec.table import __all__


def __dir__() -> list[str]:
    return sorted(__all__)
