"""One family of multi-head attention: softmax, linear, hypernetwork (HYLA) heads and any mixture of them.

    import polyhead as ph
    ph.ops.hyla(q, k, v)                                                    one op
    ph.MultiHeadAttention(64, [ph.Softmax(4), ph.Hyla(4)])                   one layer
    ph.Transformer(ph.TransformerConfig(ph.Vectors(5), ph.Values(1)))        one model
    ph.train.run(ph.recipes.RECIPES["fuzzy-hyla"]())                         one recipe

Names are found when first used, so importing the package loads nothing else.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = (
    "analysis",
    "claims",
    "compat",
    "config",
    "layers",
    "models",
    "ops",
    "recipes",
    "report",
    "reproduce",
    "shapes",
    "spec",
    "tasks",
    "train",
)

_NAMES = {
    "polyhead.config": (
        *("Mechanism", "Softmax", "Linear", "Hyla", "Relational", "Disentangled", "Abstractor"),
        *("SymbolicAttention", "RelationalSymbols", "PositionSymbols", "RelativeSymbols"),
        *("Rotary", "RelativeBias", "Alibi", "Learned", "Sinusoidal"),
        *("Mlp", "Swiglu", "Experts", "Tokens", "Vectors", "Patches", "Logits", "Values", "Classes"),
        *("CoRelNetConfig", "PrediNetConfig", "AbstractorConfig"),
        *("TransformerConfig", "Batch", "Task", "Decay", "Train", "Run", "stream", "digest"),
    ),
    "polyhead.layers.attention": ("MultiHeadAttention",),
    "polyhead.layers.heads.groups": ("SoftmaxHeads", "LinearHeads", "HylaHeads"),
    "polyhead.layers.norms": ("RMSNorm", "LayerNorm"),
    "polyhead.layers.feedforward": ("MLP", "SwiGLU", "MixtureOfExperts"),
    "polyhead.layers.positions": (
        *("RotaryEmbedding", "RelativePositionBias", "AlibiBias", "LearnedPositions", "SinusoidalPositions"),
    ),
    "polyhead.layers.block": ("TransformerBlock",),
    "polyhead.layers.taps": ("Taps",),
    "polyhead.models.transformer": ("Transformer",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULES, *_HOME]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"polyhead.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'polyhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
