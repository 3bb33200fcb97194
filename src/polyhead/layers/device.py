"""Where a module's parameters lie, and their dtype."""

from typing import TypedDict

import torch

# The type of an argument `device`; None is torch's default device.
Device = torch.device | str | None


class Placement(TypedDict, total=False):
    """The arguments `device` and `dtype` of a module, which it passes on to its parts; by default those of torch."""

    device: Device
    dtype: torch.dtype | None
