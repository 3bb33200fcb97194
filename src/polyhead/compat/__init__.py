"""Other people's formats and interfaces: `cs336` (the Stanford course), `haiku` (a tutorial's parameter tree),
`dual_attention` (the package of that name), and other people's models: `huggingface` (transformers), `torch_mha`
(`nn.MultiheadAttention`)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhead.compat import cs336, dual_attention, haiku, huggingface, torch_mha

__all__ = ["cs336", "dual_attention", "haiku", "huggingface", "torch_mha"]


if not TYPE_CHECKING:  # to a type checker a module with this function would have every name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return importlib.import_module(f"polyhead.compat.{name}")
        raise AttributeError(f"module 'polyhead.compat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
