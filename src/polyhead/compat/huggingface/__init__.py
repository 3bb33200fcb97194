"""transformers: latent codes of its models (taps.py), our heads in them (heads.py, attention.py, calls.py), and our
models as its models.  Importing this folder registers our models, heads by name, and configurations with heads."""

from polyhead.spec.optional import optional

with optional("polyhead.compat.huggingface", "polyhead[hf]"):
    from polyhead.compat.huggingface import model
    from polyhead.compat.huggingface.calls import CHECKED, verify
    from polyhead.compat.huggingface.config import PolyheadConfig
    from polyhead.compat.huggingface.heads import NAMES, register, swap_heads, with_heads
    from polyhead.compat.huggingface.model import PolyheadForCausalLM, PolyheadModel, from_run, to_folder
    from polyhead.compat.huggingface.taps import capture

__all__ = ["CHECKED", "NAMES", "PolyheadConfig", "PolyheadForCausalLM", "PolyheadModel", "capture", "from_run", "model"]
__all__ += ["register", "swap_heads", "to_folder", "verify", "with_heads"]

register()
