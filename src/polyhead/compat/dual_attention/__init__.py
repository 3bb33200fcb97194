"""The package `dual-attention`: its models and checkpoints, both ways.

load.py begins; arguments.py and models.py say what its arguments mean, export.py writes ours, tensors.py says where
tensors lie.
"""

from polyhead.compat.dual_attention.load import from_folder, load, load_attention, load_block, save, to_folder

__all__ = ["from_folder", "load", "load_attention", "load_block", "save", "to_folder"]


def __dir__() -> list[str]:
    return sorted(__all__)
