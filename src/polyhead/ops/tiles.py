"""What several implementations share: a refusal, and the tiles of pairs that are visible."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.ops.call import Masks


def unsupported_mask(masks: Masks) -> str | None:
    """Why the mask is not a key mask, or None."""
    if masks.mask is None or masks.is_of_keys:
        return None
    return f"takes masks of keys (b|1, 1, 1, s) only, not {tuple(masks.mask.shape)}"


@dataclass(frozen=True)
class Tile:
    """Queries q0 to q1 and keys k0 to k1, ends excluded."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def q(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def k(self) -> slice:
        return slice(self.k0, self.k1)

    def offsets(self, t: int) -> slice:
        """The columns j - i + t - 1 of a tensor by offset that the tile reads."""
        return slice(self.k0 - self.q1 + t, self.k1 - self.q0 + t - 1)


class VisibleTiles:
    """Which tiles have a visible pair and which have only visible pairs, by causality, window and packed sequences."""

    def __init__(self, masks: Masks, t: int, s: int, device: torch.device) -> None:
        self.t, self.s = t, s
        self.limited = masks.has_ranges(t)
        if not self.limited:
            return
        if masks.cu_seqlens is not None:
            masks = replace(masks, cu_seqlens=masks.cu_seqlens.cpu())
        first, end = masks.ranges(t, s, torch.device("cpu"))
        self.first, self.end = first.tolist(), end.tolist()
        self.device_ranges = first.to(device), end.to(device)

    def keys(self, q0: int, q1: int) -> tuple[int, int]:
        """The first key that any of these queries may attend to, and one past the last."""
        if self.limited:
            return self.first[q0], self.end[q1 - 1]
        return 0, self.s

    def hides(self, tile: Tile) -> bool:
        """Whether a pair of a tile may be hidden."""
        # Neither end of the ranges decreases: the last query's begins last, and the first query's ends first.
        return self.limited and (self.first[tile.q1 - 1] > tile.k0 or self.end[tile.q0] < tile.k1)

    def hidden(self, tile: Tile) -> Tensor:
        """True at hidden pairs (q k)."""
        first, end = self.device_ranges  # (t)
        keys = torch.arange(tile.k0, tile.k1, device=first.device)  # (k)
        return (keys < first[tile.q, None]) | (keys >= end[tile.q, None])
