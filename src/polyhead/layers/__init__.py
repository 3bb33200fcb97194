"""Modules: parameters around an op.  Plain keyword arguments; usable without our configuration."""

import torch

Device = torch.device | str | None
"""What every module takes as `device`; None is torch's default."""
