"""The zoo: each mechanism of spec.MECHANISMS with each of its options changed, alone, in mixtures, and in models.

Tests of caches, packed sequences, decoding, export, compilation and JAX use these.  A new mechanism in the table is in
all of them without new code; a new option needs its values in OPTIONS.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import polyhead as ph
from polyhead import config
from polyhead.spec import MECHANISMS, NORMALISE

SOURCES = (
    config.PositionSymbols(),
    config.SymbolicAttention(count=5),
    config.RelativeSymbols(),
    config.RelationalSymbols(count=5, neighbours=3, include_self=True),
    config.SymbolicAttention(count=5, trainable=False, dim=12),
    config.RelativeSymbols(6, distance=2),
    config.PositionSymbols(dim=5, shared=False),
    config.RelationalSymbols(count=5, shared=False, normalise=False),
    config.SymbolicAttention(count=5, once=True),
    config.RelationalSymbols(count=5, once=True),
)
OPTIONS: dict[str, Sequence[Any]] = {
    "normalise": NORMALISE,
    "act": ("relu", "silu", "identity"),
    "relation_act": ("identity", "softmax", "tanh"),
    "value_depth": (1, 2),
    "softcap": (2.0, None, 1.5),
    "sinks": (True, True, False),
    "gate": (False, True, True),
    "pool": ("mean", "max", "sum"),
    "network": ("query", "pair", "query", "query"),
    "kv_heads": (None, 1),
    "symbols": SOURCES,
    "hidden": (None, None, 8),
    "symmetric": (False, False, True, False),  # never with grouped keys, which Disentangled refuses
    "relations": (None, 3),
}
"""Values of options, by the name of the field.  Their numbers differ, so that values of two fields meet in turn."""

KINDS = {row.config: getattr(config, row.config) for row in MECHANISMS}


def variants(kind: str) -> list[Any]:
    """Two heads of a mechanism: as they are by default, then with the first value of each option, the second, ..."""
    names = {field.name for field in dataclasses.fields(KINDS[kind])} & OPTIONS.keys()
    count = max(len(OPTIONS[name]) for name in names)
    changed = [{name: OPTIONS[name][i % len(OPTIONS[name])] for name in names} for i in range(count)]
    groups = [KINDS[kind](2), *(KINDS[kind](2, **values) for values in changed)]
    return list(dict.fromkeys(groups))


def _dealt(group_size: int) -> dict[str, list[Any]]:
    """All variants, in mixtures of `group_size` groups, of different kinds as far as possible."""
    rounds = itertools.zip_longest(*map(variants, KINDS))
    groups = [group for variety in rounds for group in variety if group is not None]
    parts = [groups[i : i + group_size] for i in range(0, len(groups), group_size)]
    return {f"{i}-{'-'.join(type(group).__name__ for group in part)}": part for i, part in enumerate(parts)}


ALONE = {kind: [make(4)] for kind, make in KINDS.items()}
SHARED = [config.Softmax(2, dim=2, value_dim=3), *(make(2, dim=2, value_dim=3, share=True) for make in KINDS.values())]
"""All read the queries and keys of the first group; sizes are given."""
MIXTURES = _dealt(4) | {"shared": SHARED}
EVERY = ALONE | MIXTURES
VARIANTS = {kind: variants(kind) for kind in KINDS}
FEW = {f"all {i}": [groups[i % len(groups)] for groups in VARIANTS.values()] for i in (1, 3, 8)}
"""One variant of each mechanism in a mixture: for slow tests."""

POSITIONS = {
    "none": None,
    "rotary": config.Rotary(),
    "t5": config.RelativeBias(8, 8),
    "alibi": config.Alibi(),
    "learned": config.Learned(),
    "sinusoidal": config.Sinusoidal(),
}
IN_LAYERS = ("none", "rotary", "t5", "alibi")
"""Positions in the attention itself; the others are added to the input of a model."""


def width(heads: Sequence[Any]) -> int:
    """The width of a model: four per head, for any number of mechanisms."""
    return 4 * sum(group.heads for group in heads)


def turns(names: Sequence[str], values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Each name with one of the values, in turn; the last of the names with all of them."""
    pairs = [(name, values[i % len(values)]) for i, name in enumerate(names)]
    return list(dict.fromkeys([*pairs, *((names[-1], value) for value in values)]))


def models(heads: dict[str, list[Any]] = EVERY, **options: Any) -> dict[str, config.TransformerConfig]:
    """Causal language models over 12 tokens, two layers of these heads; options that are not given vary by model."""
    forward = (config.Swiglu(24), config.Mlp(24), config.Experts(3, 2, hidden=8))
    tied = config.Logits(12, tied=True), config.Logits(12)
    configs, common = {}, {"inputs": config.Tokens(12), "layers": 2, "causal": True, "max_length": 24}
    for i, (name, groups) in enumerate(heads.items()):
        fields = {"positions": [*POSITIONS.values()][i % 6], "feedforward": forward[i % 3], "outputs": tied[i % 2]}
        fields |= {"window": (None, None, 3)[i % 3], "qk_norm": i % 4 == 1, "norm_order": ("pre", "pre", "post")[i % 3]}
        fields |= {**common, "dim": width(groups), "heads": groups}
        configs[name] = config.TransformerConfig(**{**fields, **options})
    return configs


def far(module: nn.Module) -> Any:
    """The module in evaluation, far from its initial values: near-uniform attention and biases of 0 hide faults."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.ndim > 1 else 0.1)
    return module.eval()


def make_layer(heads: Any, dim: int = 48, **options: Any) -> Any:
    """Attention in float64 with biases."""
    torch.manual_seed(0)
    layer = ph.MultiHeadAttention(dim, heads, **{"bias": True, "max_length": 16, "dtype": torch.float64, **options})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.eval()


def tokens(t: int, b: int = 2) -> torch.Tensor:
    """What such a layer reads."""
    return torch.randn(b, t, 48, dtype=torch.float64)


def fresh(settings: config.TransformerConfig, dtype: torch.dtype = torch.float64) -> Any:
    """A model as it is initialised; in float64, so that no rounding decides between tokens."""
    torch.manual_seed(0)
    return ph.Transformer(settings, dtype=dtype).eval()


def make_model(settings: config.TransformerConfig) -> Any:
    """A model far from its initial values."""
    return far(fresh(settings))
