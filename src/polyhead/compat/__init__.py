"""Formats and interfaces of others: `cs336` (the Stanford course), `haiku` (a tutorial's module and parameters),
`dual_attention` (models of that package); and models of others: `huggingface` (transformers), `torch_mha`
(`nn.MultiheadAttention`).

Each is imported when it is first used, because some need packages of others."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhead.compat import cs336, dual_attention, haiku, huggingface, torch_mha

__all__ = ["cs336", "dual_attention", "haiku", "huggingface", "torch_mha"]

if not TYPE_CHECKING:  # for a type checker, a package with this function would have every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return importlib.import_module(f"{__name__}.{name}")
