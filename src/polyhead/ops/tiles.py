"""Parts that several implementations share: refusals, key masks, and the tiles of pairs that are visible."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.call import AttentionCall, Masks, sequence_of
from polyhead.ops.latent_code import is_key_mask, of_pairs


def mask_of_keys(call: AttentionCall) -> Tensor | None:
    """A mask for which `is_key_mask` holds, as (b|1 s)."""
    if call.mask is None:
        return None
    return of_pairs(call.mask)[:, 0, 0].expand(-1, call.k.shape[1])


def unsupported_mask(call: AttentionCall) -> str | None:
    """Why the mask is not a key mask, or None."""
    if call.mask is None or is_key_mask(call.mask):
        return None
    return f"takes masks of keys (b|1, 1, 1, s) only, not {tuple(call.mask.shape)}"


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


def visible_ranges(masks: Masks, t: int, s: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each query the first visible key and one past the last, ignoring the mask: two non-decreasing (t) of int32.

    For a query without a visible key the range is empty.
    """
    position = torch.arange(s - t, s, device=device, dtype=torch.int32)
    first, end = torch.zeros_like(position), torch.full_like(position, s)
    if masks.causal:
        end = position + 1
    if masks.window is not None:
        window = min(masks.window, t + s)  # keep sums within int32
        first, end = position - (window - 1), torch.minimum(end, position + window)
    if masks.cu_seqlens is not None:
        edges = F.pad(masks.cu_seqlens[1:], (1, 0))  # rows behind the last edge form one more sequence
        sequence = sequence_of(masks.cu_seqlens, t)
        first = torch.maximum(first, edges[sequence])
        end = torch.minimum(end, F.pad(edges[1:], (0, 1), value=t)[sequence])
    return first.clamp_(min=0), end.clamp_(min=0, max=s)


class VisibleTiles:
    """Which tiles have a visible pair and which have only visible pairs, by causality, window and packed sequences."""

    def __init__(self, masks: Masks, t: int, s: int, device: torch.device) -> None:
        self.t, self.s = t, s
        self.limited = masks.has_ranges
        if not self.limited:
            return
        if masks.cu_seqlens is not None:
            masks = replace(masks, cu_seqlens=masks.cu_seqlens.cpu())
        first, end = visible_ranges(masks, t, s, torch.device("cpu"))
        self.first, self.end = first.tolist(), end.tolist()
        self.rows = first.to(device), end.to(device)

    def keys(self, q0: int, q1: int) -> tuple[int, int]:
        """The first key that any of these queries may attend to, and one past the last."""
        return (self.first[q0], self.end[q1 - 1]) if self.limited else (0, self.s)

    def hides(self, at: Tile) -> bool:
        """Whether a pair of a tile may be hidden."""
        return self.limited and (self.first[at.q1 - 1] > at.k0 or self.end[at.q0] < at.k1)

    def hidden(self, at: Tile) -> Tensor:
        """True at hidden pairs (q k)."""
        first, end = (x[at.q, None] for x in self.rows)
        keys = torch.arange(at.k0, at.k1, device=first.device)
        return (keys < first) | (keys >= end)
