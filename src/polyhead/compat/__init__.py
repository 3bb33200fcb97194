"""Other people's formats and interfaces, one file each: `cs336` (the Stanford course), `haiku` (a tutorial's
parameter tree), `dual_attention` (the package of that name), and the latent codes of other people's models:
`huggingface` (transformers), `torch_mha` (`nn.MultiheadAttention`)."""

import importlib
from typing import Any

_MODULES = ("cs336", "dual_attention", "haiku", "huggingface", "torch_mha")

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"polyhead.compat.{name}")
    raise AttributeError(f"module 'polyhead.compat' has no attribute {name!r}")
