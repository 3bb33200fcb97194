"""Training sets of a given size: distinct rows of integers, drawn once; and fresh rows outside the training set."""

from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.config import stream

Draw = Callable[[Tensor], Tensor]
"""Maps kinds (n) to rows (n k) of integers, one row for each kind."""


def training_set(draw: Draw, count: int) -> Tensor:
    """Rows of the kinds 0 to `count` - 1, all distinct.  More than `count` rows must exist."""
    kinds = torch.arange(count)
    rows = draw(kinds)
    while bool((bad := _repeated(_keys(rows))).any()):
        rows[bad] = draw(kinds[bad])
    return rows


def unseen(draw: Draw, kinds: Tensor, seen: Tensor) -> Tensor:
    """Rows of `kinds` (n) that are not in `seen`."""
    rows, keys = draw(kinds), _keys(seen)
    while bool((bad := torch.isin(_keys(rows), keys)).any()):
        rows[bad] = draw(kinds[bad])
    return rows


def distinct(n: int, count: int, among: int, generator: torch.Generator) -> Tensor:
    """`n` rows of `count` distinct numbers below `among`, all such rows equally likely."""
    chosen = torch.zeros(n, 0, dtype=torch.long, device=generator.device)
    for i in range(count):
        number = torch.randint(among - i, (n,), generator=generator, device=generator.device)
        for taken in chosen.sort(dim=1).values.unbind(1):  # ascending: `number` counts only untaken numbers
            number = number + (number >= taken)
        chosen = torch.cat((chosen, number[:, None]), 1)
    return chosen


def picks(count: int, n: int, generator: torch.Generator) -> Tensor:
    """`n` indices below `count`, drawn with replacement."""
    return torch.randint(count, (n,), generator=generator, device=generator.device)


def _keys(rows: Tensor) -> Tensor:
    """A 64-bit hash (n) of each row.  A collision has probability 2^-64 and costs at most one fresh row."""
    factors = [stream(0, "examples/key", column) | 1 for column in range(rows.shape[1])]
    return ((rows + 1) * torch.tensor(factors, device=rows.device)).sum(dim=1)


def _repeated(keys: Tensor) -> Tensor:
    """True where the same key occurred earlier."""
    order = keys.argsort(stable=True)
    again = torch.zeros(len(keys), dtype=torch.bool)
    again[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    return again
