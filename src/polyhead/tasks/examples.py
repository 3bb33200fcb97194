"""Training sets of a given size: distinct rows of integers, drawn once; and fresh rows outside the training set."""

from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.tasks.base import stream

# Maps kinds (n) to rows (n k) of integers, one row for each kind.
Draw = Callable[[Tensor], Tensor]


def training_set(draw: Draw, count: int) -> Tensor:
    """Rows of the kinds 0 to `count` - 1, all distinct.  More than `count` rows must exist."""
    return _drawn_until(draw, torch.arange(count), _is_repeated)


def unseen(draw: Draw, kinds: Tensor, training_rows: Tensor) -> Tensor:
    """Rows of `kinds` (n) that are not in `training_rows`."""
    training_keys = _keys(training_rows)
    return _drawn_until(draw, kinds, lambda keys: torch.isin(keys, training_keys))


def _drawn_until(draw: Draw, kinds: Tensor, is_refused: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of `kinds` (n), each drawn again until its key is not refused."""
    rows = draw(kinds)
    refused = is_refused(_keys(rows))
    while refused.any():
        rows[refused] = draw(kinds[refused])
        refused = is_refused(_keys(rows))
    return rows


def distinct(n: int, count: int, limit: int, generator: torch.Generator) -> Tensor:
    """`n` rows of `count` distinct numbers below `limit`, all such rows equally likely."""
    rows = torch.zeros(n, 0, dtype=torch.long, device=generator.device)
    for i in range(count):
        number = torch.randint(limit - i, (n,), generator=generator, device=generator.device)
        # `number` is a rank among the numbers that the row lacks: step over those it has, in ascending order.
        for previous in rows.sort(dim=1).values.unbind(1):
            number = number + (number >= previous)
        rows = torch.cat((rows, number[:, None]), 1)
    return rows


def picks(count: int, n: int, generator: torch.Generator) -> Tensor:
    """`n` indices below `count`, drawn with replacement."""
    return torch.randint(count, (n,), generator=generator, device=generator.device)


def _keys(rows: Tensor) -> Tensor:
    """A 64-bit hash (n) of each row.  A collision has probability 2^-64 and costs at most one fresh row."""
    factors = [stream(0, "examples/key", column) | 1 for column in range(rows.shape[1])]
    return ((rows + 1) * torch.tensor(factors, device=rows.device)).sum(dim=1)


def _is_repeated(keys: Tensor) -> Tensor:
    """True where the same key occurred earlier."""
    order = keys.argsort(stable=True)
    repeated = torch.zeros(len(keys), dtype=torch.bool)
    repeated[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    return repeated
