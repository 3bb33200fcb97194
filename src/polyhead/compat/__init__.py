"""Formats and interfaces of others: `cs336` (the Stanford course), `haiku` (a tutorial's parameter tree),
`dual_attention` (the package of that name); and models of others: `huggingface` (transformers), `torch_mha`
(`nn.MultiheadAttention`; its `replace` takes timm's attention, too)."""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.compat import cs336, dual_attention, haiku, huggingface, torch_mha

__all__ = ["cs336", "dual_attention", "haiku", "huggingface", "torch_mha"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
