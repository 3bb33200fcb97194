"""Shared definitions, without torch and jax: table.py has the names of `polyhead.spec`, shapes.py checks sizes.

checked.py checks fields of configurations, optional.py imports extras, home.py finds folders, files.py and values.py
treat JSON.
"""

from polyhead.spec.table import *  # noqa: F403
