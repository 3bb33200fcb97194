"""Shared definitions: the letters of shapes, the table of mechanisms, one mapping of parameter trees.

Imports neither torch nor jax.  `polyhead.spec.NAME` comes from the table (table.py) when it is first used: the command
line needs the table for few commands.  shapes.py checks sizes.
"""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.spec.table import (
        ACTS,
        AXES,
        CAUSAL,
        CODE,
        COMMON,
        MASKED_PAIR,
        MASKED_ROW,
        MECHANISMS,
        MIX,
        NETWORKS,
        NORMALISE,
        POOLS,
        PROJECTIONS,
        QKV,
        RELATION_ACTS,
        RELATION_INIT,
        RMS_HEADS_EPS,
        SOFTMAX_AXIS,
        SYMBOLS,
        VALUES,
        Mechanism,
        Step,
        amount,
        mechanism,
        shape,
    )

__all__ = [
    "ACTS",
    "AXES",
    "CAUSAL",
    "CODE",
    "COMMON",
    "MASKED_PAIR",
    "MASKED_ROW",
    "MECHANISMS",
    "MIX",
    "NETWORKS",
    "NORMALISE",
    "POOLS",
    "PROJECTIONS",
    "QKV",
    "RELATION_ACTS",
    "RELATION_INIT",
    "RMS_HEADS_EPS",
    "SOFTMAX_AXIS",
    "SYMBOLS",
    "VALUES",
    "Mechanism",
    "Step",
    "amount",
    "mechanism",
    "shape",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__, dict.fromkeys(__all__, "table"))
