"""The package `dual-attention`: its models and checkpoints, both ways.

Start with load.py.  arguments.py and models.py translate its arguments, export.py translates our settings back, and
tensors.py maps its tensors to ours.
"""

from polyhead.compat.dual_attention.load import from_folder, load, load_attention, load_block, save, to_folder

__all__ = ["from_folder", "load", "load_attention", "load_block", "save", "to_folder"]


def __dir__() -> list[str]:
    return sorted(__all__)
