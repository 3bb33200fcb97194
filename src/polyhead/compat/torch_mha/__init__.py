"""`nn.MultiheadAttention`: its latent codes (taps.py), our module with its interface (module.py), its replacement
(replace.py), and decoding with a cache (cached.py)."""

from polyhead.compat.torch_mha.cached import cached
from polyhead.compat.torch_mha.module import MultiheadAttention
from polyhead.compat.torch_mha.replace import drop_in, replace
from polyhead.compat.torch_mha.taps import capture

__all__ = ["MultiheadAttention", "cached", "capture", "drop_in", "replace"]
