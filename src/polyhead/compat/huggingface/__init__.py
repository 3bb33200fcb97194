"""transformers: latent codes of its models (taps.py), our heads in them (heads.py, attention.py), which layers are ours
(calls.py), and our models among its own (model.py, config.py, cache.py, tokens.py).

`capture` needs no transformers; everything else imports it when asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from polyhead.compat.huggingface.taps import capture
from polyhead.spec.optional import optional

if TYPE_CHECKING:
    from polyhead.compat.huggingface.calls import Verified, verify
    from polyhead.compat.huggingface.config import PolyheadConfig
    from polyhead.compat.huggingface.heads import NAMES, register, swap_heads, with_heads
    from polyhead.compat.huggingface.model import (
        PolyheadForCausalLM,
        PolyheadForImageClassification,
        from_run,
        to_folder,
    )

_HOMES = {
    **dict.fromkeys(("NAMES", "register", "swap_heads", "with_heads"), "heads"),
    **dict.fromkeys(("Verified", "verify"), "calls"),
    **dict.fromkeys(("PolyheadConfig", "PolyheadForCausalLM", "PolyheadForImageClassification"), "model"),
    **dict.fromkeys(("from_run", "to_folder"), "model"),
}
__all__ = [
    "NAMES",
    "PolyheadConfig",
    "PolyheadForCausalLM",
    "PolyheadForImageClassification",
    "Verified",
    "capture",
    "from_run",
    "register",
    "swap_heads",
    "to_folder",
    "verify",
    "with_heads",
]


if not TYPE_CHECKING:  # to a type checker a module with this function would have every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with optional("polyhead.compat.huggingface", "polyhead[hf]"):
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
