"""transformers: latent codes of its models (taps.py), our heads in its models (heads.py, attention.py), the check of
its layers (calls.py), its models for `polyhead explore` (explore.py), and our models as its models (model.py, base.py,
config.py, cache.py, tokens.py, card.py).

Importing this folder registers our models with the Auto classes, our heads as `attn_implementation`, and configurations
with heads.  If transformers is not installed, nothing is registered, and using a name raises an error that says so.
"""

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from polyhead.spec.optional import MissingPackage, optional

if TYPE_CHECKING:
    from polyhead.compat.huggingface.calls import Verified, verify
    from polyhead.compat.huggingface.config import PolyheadConfig
    from polyhead.compat.huggingface.heads import NAMES, register, swap_heads, with_heads
    from polyhead.compat.huggingface.model import (
        PolyheadForCausalLM,
        PolyheadForImageClassification,
        PolyheadForSequenceClassification,
        PolyheadModel,
        from_run,
        to_folder,
    )
    from polyhead.compat.huggingface.taps import capture

_HOMES = {
    **dict.fromkeys(("NAMES", "register", "swap_heads", "with_heads"), "heads"),
    **dict.fromkeys(("Verified", "verify"), "calls"),
    "capture": "taps",
}
"""The modules of names that are not in model.py."""
__all__ = [
    "NAMES",
    "PolyheadConfig",
    "PolyheadForCausalLM",
    "PolyheadForImageClassification",
    "PolyheadForSequenceClassification",
    "PolyheadModel",
    "Verified",
    "capture",
    "from_run",
    "register",
    "swap_heads",
    "to_folder",
    "verify",
    "with_heads",
]


if not TYPE_CHECKING:  # for a type checker, a module with this function has every name

    def __getattr__(name: str) -> Any:
        if name not in __all__ and not name.startswith("Polyhead"):  # as PolyheadLlamaConfig, which `heads` creates
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _HOMES.get(name, "model" if name in __all__ else "heads")
        with optional("polyhead.compat.huggingface", "polyhead[hf]"):
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)


with contextlib.suppress(MissingPackage):
    importlib.import_module(f"{__name__}.model")
    importlib.import_module(f"{__name__}.heads").register()
