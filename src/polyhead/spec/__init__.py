"""Shared definitions: the letters of shapes, the table of mechanisms, one mapping of parameter trees.

Imports neither torch nor jax.  `polyhead.spec.NAME` comes from the table (table.py); shapes.py checks sizes.
"""

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


def __dir__() -> list[str]:
    return sorted(__all__)
