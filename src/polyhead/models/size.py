"""Parameter counts, computed on the meta device without memory, and widths that give a model a wanted count."""

import dataclasses
import functools
import math
from typing import Any, TypeVar

import torch

from polyhead.config import Experts, Heads, Mlp, Model, Swiglu, SymbolicAttention, TransformerConfig
from polyhead.models.build import build

M = TypeVar("M", bound=Model)

# The largest width that `match` tries.
LARGEST_WIDTH = 1 << 16


@functools.cache  # a study asks for the same few hundred counts many times
def parameters(settings: Model) -> int:
    """The number of parameters of a model; tied tables count once."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(settings, device="meta").parameters())


def match(settings: M, target: int, *, field: str = "dim", tolerance: float = 0.01) -> M:
    """`settings` with the width that brings the number of parameters nearest to `target`, within `tolerance` of it.

    `field`: "dim" is the model width, in steps that the heads divide; "hidden" is the width of the feed-forward layers;
    both include an encoder.  "both" takes the nearest dim, then the nearest hidden.  For other models, any of their
    integer fields.  Widths given in the settings, such as the `dim` of a head, stay.

    >>> dual = TransformerConfig(Tokens(50), Logits(50), dim=64, heads=[Softmax(2), Relational(2)])
    >>> softmax = match(dataclasses.replace(dual, heads=Softmax(4)), parameters(dual), field="hidden")
    >>> softmax.feedforward.hidden, parameters(softmax), parameters(dual)
    (415, 147006, 147072)

    Raises ValueError if no width comes that near.
    """
    if field == "both":
        wide = _nearest(settings, target, "dim")[0]
        return match(wide, target, field="hidden", tolerance=tolerance)
    nearest, others = _nearest(settings, target, field)
    count = parameters(nearest)
    if abs(count - target) > tolerance * target:
        tried = ", ".join(f"{_value(s, field)} has {parameters(s):,}" for s in others)
        raise ValueError(f"match: no {field} gives {target:,} parameters within {tolerance:.1%}: {tried}")
    return nearest


def _nearest(settings: M, target: int, field: str) -> tuple[M, list[M]]:
    """The settings nearest to `target`, and the one or two candidates around it."""
    step = _step(settings, field)
    # In steps: `low` is too small (or 0), `high` is large enough.
    low, high = _bounds(settings, target, field, step)
    while high - low > 1:
        middle = (low + high) // 2
        if _count(settings, field, middle * step) < target:
            low = middle
        else:
            high = middle
    around = [resized(settings, field, n * step) for n in (low, high) if n]
    return min(around, key=lambda candidate: abs(parameters(candidate) - target)), around


def _bounds(settings: Model, target: int, field: str, step: int) -> tuple[int, int]:
    """Numbers of steps around the wanted one."""
    low, high = 0, 1
    first = _count(settings, field, step)
    if field != "dim" and first < target:  # most counts are linear in the width
        slope = max(_count(settings, field, 2) - first, 1)
        low = min(1 + (target - first - 1) // slope, LARGEST_WIDTH)
        high = low + 1
        # Where counts grow faster than on this line, the wanted width is below the guess.
        if low > 1 and _count(settings, field, low) >= target:
            low, high = 1, low
    while _count(settings, field, high * step) < target and high * step < LARGEST_WIDTH:
        low, high = high, 2 * high
    return low, high


def _count(settings: Model, field: str, width: int) -> int:
    return parameters(resized(settings, field, width))


def _step(settings: Model, field: str) -> int:
    """The step: all widths are multiples of it."""
    if field != "dim":
        return 1
    if not isinstance(settings, TransformerConfig):
        return math.lcm(getattr(settings, "heads", 1), _step_of_symbols(settings))
    steps = [_step_of_symbols(settings.encoder)]
    # An encoder gets the same width, which its heads must divide, too.
    parts = [settings]
    if isinstance(settings.encoder, TransformerConfig):
        parts.append(settings.encoder)
    for part in parts:
        for i in range(part.layers):
            steps += _steps_of_heads(part.layer_heads(i))
            if part.encoder is not None:
                steps += _steps_of_heads(part.layer_cross_heads(i))
    return math.lcm(*steps)


def _steps_of_heads(heads: Heads) -> list[int]:
    # Twice the heads, because rotary and sinusoidal positions need even widths.
    return [2 * sum(group.heads for group in heads), *map(_step_of_symbols, heads)]


def _step_of_symbols(part: object) -> int:
    """The step for the source of symbols of heads or of an Abstractor; 1 without one."""
    source = getattr(part, "symbols", None)
    if not isinstance(source, SymbolicAttention):
        return 1
    return math.lcm(source.heads or 1, getattr(source, "relations", 1))


def resized(settings: M, field: str, width: int) -> M:
    """`settings` with another value of `field`, see `match`.  Raises ValueError for a field that it does not have."""
    if not isinstance(settings, TransformerConfig):
        if not hasattr(settings, field) or type(getattr(settings, field)) not in (int, type(None)):
            raise ValueError(f"match: {type(settings).__name__} has no integer {field!r}")
        changed: dict[str, Any] = {field: width}
        return dataclasses.replace(settings, **changed)
    if field not in ("dim", "hidden"):
        raise ValueError(f'match: field must be "dim", "hidden" or "both" but is {field!r}')
    changes: dict[str, Any] = {"dim": width}
    if field == "hidden":
        kind = settings.feedforward
        if not isinstance(kind, (Mlp, Swiglu, Experts)):
            raise ValueError(f"match: {type(kind).__name__} is not of this package, so its width cannot be matched")
        changes = {"feedforward": dataclasses.replace(kind, hidden=width)}
    # Cross-attention reads the encoder's stream, so both need one model width; hidden widths change together, too.
    if settings.encoder is not None:
        changes["encoder"] = resized(settings.encoder, field, width)
    return dataclasses.replace(settings, **changes)


def _value(settings: Model, field: str) -> str:
    feedforward: Mlp | Swiglu | Experts | None = getattr(settings, "feedforward", None)
    if field == "hidden" and feedforward is not None:
        return f"hidden {feedforward.hidden}"
    return f"{field} {getattr(settings, field)}"
