"""`nn.MultiheadAttention`: our module with its interface (module.py), its replacement (replace.py), and its latent
codes (taps.py)."""

from polyhead.compat.torch_mha.module import MultiheadAttention
from polyhead.compat.torch_mha.replace import drop_in, replace
from polyhead.compat.torch_mha.taps import capture

__all__ = ["MultiheadAttention", "capture", "drop_in", "replace"]
