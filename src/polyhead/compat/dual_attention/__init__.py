"""Language models of the package `dual-attention`, loaded as ours.  Start with load.py.

arguments.py translates the package's arguments, tensors.py maps its tensors.
"""

from polyhead.compat.dual_attention.load import from_folder, load

__all__ = ["from_folder", "load"]
