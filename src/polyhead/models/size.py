"""Parameter counts, computed on the meta device without memory, and widths that give a model a wanted count."""

import dataclasses
import functools
from typing import Any, TypeVar

import torch

from polyhead.config import Model, TransformerConfig
from polyhead.models.build import build

M = TypeVar("M", bound=Model)

# The largest width that `match` tries.
LARGEST_WIDTH = 1 << 16


@functools.cache  # a study asks for the same few hundred counts many times
def parameters(settings: Model) -> int:
    """The number of parameters of a model; tied tables count once."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(settings, device="meta").parameters())


def match(settings: M, target: int, *, field: str, tolerance: float = 0.01) -> M:
    """`settings` with the width that brings the number of parameters nearest to `target`.

    >>> dual = TransformerConfig(Tokens(50), Logits(50), dim=64, heads=[Softmax(2), Relational(2)])
    >>> softmax = match(dataclasses.replace(dual, heads=Softmax(4)), parameters(dual), field="hidden")
    >>> softmax.feedforward.hidden, parameters(softmax), parameters(dual)
    (415, 147006, 147072)

    Args:
        field: The width that changes: "hidden" of the feed-forward layers, those of an encoder too.  For models that
            are no transformer, any of their integer fields.
        tolerance: The largest difference from `target`, as a part of `target`.

    Raises:
        ValueError: If no width comes within `tolerance`, and for any other field.
    """

    def count(width: int) -> int:
        return parameters(resized(settings, field, width))

    low, high = 1, 8
    while count(high) < target and high < LARGEST_WIDTH:
        low, high = high, min(8 * high, LARGEST_WIDTH)
    while high - low > 1 and count(low) < target < count(high):
        # The count of a transformer is linear in the width, so the line through both ends meets the target.
        middle = low + (target - count(low)) * (high - low) // (count(high) - count(low))
        middle = min(max(middle, low + 1), high - 1)
        if count(middle) < target:
            low = middle
        else:
            high = middle
    counts = {width: count(width) for width in (low, high)}
    nearest = min(counts, key=lambda width: abs(counts[width] - target))
    if abs(counts[nearest] - target) > tolerance * target:
        tried = ", ".join(f"{field} {width} has {count:,}" for width, count in counts.items())
        raise ValueError(f"match: no {field} gives {target:,} parameters within {tolerance:.1%}: {tried}")
    return resized(settings, field, nearest)


def resized(settings: M, field: str, width: int) -> M:
    """`settings` with another value of `field`, see `match`.  Raises ValueError for a field that it does not have."""
    if not isinstance(settings, TransformerConfig):
        if not hasattr(settings, field) or type(getattr(settings, field)) not in (int, type(None)):
            raise ValueError(f"match: {type(settings).__name__} has no integer {field!r}")
        changed: dict[str, Any] = {field: width}
        return dataclasses.replace(settings, **changed)
    if field != "hidden":
        raise ValueError(f'match: field must be "hidden" but is {field!r}')
    changes: dict[str, Any] = {"feedforward": dataclasses.replace(settings.feedforward, hidden=width)}
    if settings.encoder is not None:
        changes["encoder"] = resized(settings.encoder, field, width)
    return dataclasses.replace(settings, **changes)
