"""`nn.MultiheadAttention`: our module with its interface, its replacement by ours, and its latent codes."""

from polyhead.compat.torch_mha.module import MultiheadAttention
from polyhead.compat.torch_mha.replace import drop_in, replace
from polyhead.compat.torch_mha.taps import capture

__all__ = ["MultiheadAttention", "capture", "drop_in", "replace"]
