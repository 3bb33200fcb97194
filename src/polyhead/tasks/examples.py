"""Training sets of a given size: distinct rows of integers, drawn once; and fresh rows outside the training set."""

from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.tasks.base import stream

# Maps kinds (n) to rows (n k) of integers, one row for each kind.
Draw = Callable[[Tensor], Tensor]


def training_set(draw: Draw, count: int) -> Tensor:
    """Rows of the kinds 0 to `count` - 1, all distinct.  More than `count` rows must exist."""
    return _drawn_until(draw, torch.arange(count, device="cpu"), _is_repeated)


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
    ranks = []
    for i in range(count):
        ranks.append(torch.randint(limit - i, (n,), generator=generator, device=generator.device))
    return unranked(torch.stack(ranks, 1))


def unranked(ranks: Tensor) -> Tensor:
    """Distinct numbers (... k): number i is the one of rank ranks[i] among those that numbers 0 to i - 1 left.

    >>> unranked(torch.tensor([0, 0, 0]))
    tensor([0, 1, 2])
    """
    numbers = ranks.clone()
    # From the last to the first: each later number that is not below number i makes room for it.
    for i in range(numbers.shape[-1] - 2, -1, -1):
        numbers[..., i + 1 :] += numbers[..., i + 1 :] >= numbers[..., i : i + 1]
    return numbers


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
    repeated = torch.zeros(len(keys), dtype=torch.bool, device="cpu")
    repeated[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    return repeated
