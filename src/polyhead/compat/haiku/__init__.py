"""The multi-head attention of the tutorial "Yet Another (JAX) Transformer": a Haiku module, and its parameters in
PyTorch.

    haiku.MultiheadAttention(d_model, num_heads)      the module, for hk.transform; needs dm-haiku
    haiku.from_haiku(params, heads=8)                 our PyTorch layer with the module's parameters; needs NumPy only
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhead.compat.haiku.module import MultiHeadAttention, MultiheadAttention
    from polyhead.compat.haiku.parameters import from_haiku, from_haiku_mask, to_haiku, to_state_dict

__all__ = ["MultiHeadAttention", "MultiheadAttention", "from_haiku", "from_haiku_mask", "to_haiku", "to_state_dict"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # The module needs Haiku and JAX, its parameters need PyTorch: neither asks for the other's.
        if name in ("from_haiku", "from_haiku_mask", "to_haiku", "to_state_dict"):
            from polyhead.compat.haiku import parameters

            return getattr(parameters, name)
        if name in ("MultiheadAttention", "MultiHeadAttention"):
            from polyhead.compat.haiku.module import MultiheadAttention

            return MultiheadAttention
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
