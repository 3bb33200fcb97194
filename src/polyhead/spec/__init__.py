"""Shared definitions: the letters of shapes, the table of mechanisms, one mapping of parameter trees.

Imports neither torch nor jax.  table.py has the names of `polyhead.spec`; shapes.py checks sizes.
"""

from polyhead.spec.table import *  # noqa: F403
from polyhead.spec.table import __all__ as __all__
