"""Where a module lies."""

import torch

# The type of every module's argument `device`; None is torch's default device.
Device = torch.device | str | None
