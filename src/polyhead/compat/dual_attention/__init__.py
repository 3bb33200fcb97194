"""Language models and attention modules of the package `dual-attention`, loaded as ours.  Start with load.py.

attention.py and language.py translate the package's arguments, tensors.py maps its tensors.
"""

from polyhead.compat.dual_attention.load import from_folder, load, load_attention

__all__ = ["from_folder", "load", "load_attention"]
