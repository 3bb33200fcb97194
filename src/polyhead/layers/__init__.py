"""Modules: parameters around an op.  Plain keyword arguments; usable without our configuration."""

from typing import TYPE_CHECKING

import torch

from polyhead.spec.lazy import lazy

Device = torch.device | str | None
"""What every module takes as `device`; None is torch's default."""

__all__ = ["attention", "block", "cache", "feedforward", "heads", "norms", "positions", "symbols", "taps", "testing"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
