"""transformers: latent codes of its models (taps.py), our heads in its models (heads.py, attention.py), the check of
its layers (calls.py), its models for `polyhead explore` (explore.py), and our models as its models (model.py, base.py,
inputs.py, config.py, cache.py, tokens.py).

Importing this folder registers our models with the Auto classes, our heads as `attn_implementation`, and configurations
with heads.
"""

from typing import Any

from polyhead.spec.optional import optional

with optional("polyhead.compat.huggingface", "polyhead[hf]"):
    from polyhead.compat.huggingface import heads, model
    from polyhead.compat.huggingface.calls import verify
    from polyhead.compat.huggingface.config import PolyheadConfig
    from polyhead.compat.huggingface.heads import NAMES, register, swap_heads, with_heads
    from polyhead.compat.huggingface.model import (
        PolyheadForCausalLM,
        PolyheadModel,
        from_run,
        to_folder,
    )
    from polyhead.compat.huggingface.taps import capture

__all__ = [
    "NAMES",
    "PolyheadConfig",
    "PolyheadForCausalLM",
    "PolyheadModel",
    "capture",
    "from_run",
    "model",
    "register",
    "swap_heads",
    "to_folder",
    "verify",
    "with_heads",
]

register()


def __getattr__(name: str) -> Any:
    """PolyheadLlamaConfig, PolyheadLlamaForCausalLM and so on, which `register` creates."""
    if name.startswith("Polyhead") and hasattr(heads, name):
        return getattr(heads, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
