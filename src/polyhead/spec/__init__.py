"""Shared definitions, without torch and jax: table.py has the names of `polyhead.spec`, shapes.py checks sizes."""

from polyhead.spec.table import *  # noqa: F403
