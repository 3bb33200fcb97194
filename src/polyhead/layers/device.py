"""Where a module lies."""

import torch

Device = torch.device | str | None
"""The type of every module's argument `device`; None is torch's default device."""
