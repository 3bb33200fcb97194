"""Models of random mixtures: decoding in pieces with a cache against the full pass; padded rows of several lengths."""

import random

import parity_mixtures as mixtures
import torch
from parity_measure import EXACT, Outcome, error_exact, judged, outcome_of

from polyhead.layers.cache import Cache


def check_number(seed: int, number: int) -> Outcome:
    """The outcome of case `number`: "output" beside the full pass, "alone" each row beside itself without padding."""
    dice = random.Random(f"cache {seed} {number}")
    settings = mixtures.draw(dice, causal=True)
    b, t = dice.choice((1, 2, 3)), dice.choice((1, 2, 5, 9, 16, 17, 31, 32, 40))
    pieces, how = mixtures.cuts(dice, t), dice.choice(("whole", "ragged", "ragged"))
    kind = type(settings.positions).__name__
    group, words = f"cache {how} {kind}", f"{settings}, b {b}, pieces {pieces}"

    def run() -> Outcome:
        return judged(group, words, _errors(settings, mixtures.tokens(dice, b, t), pieces, how, dice, number))

    return outcome_of(group, words, run)


@torch.no_grad()
def _errors(settings, x, pieces, how, dice, number):  # type: ignore[no-untyped-def]
    model, (b, t) = mixtures.build(settings, number), x.shape
    lengths = [t] + [t if how == "whole" else dice.randint(1, t) for _ in range(b - 1)]
    mask = torch.arange(t) >= t - torch.tensor(lengths)[:, None] if how == "ragged" else None
    where = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    whole, cache, parts = model(x, mask=mask, positions=where), Cache(settings.layers), []
    for first, last in pieces:
        own = [None if given is None else given[:, first:last] for given in (mask, where)]
        parts.append(model(x[:, first:last], mask=own[0], positions=own[1], cache=cache))
    real = torch.ones(b, t, dtype=torch.bool) if mask is None else mask
    size = whole[real].norm().item()
    errors = {"output": (error_exact(torch.cat(parts, 1)[real], whole[real], size), EXACT)}
    if mask is not None:
        alone = torch.cat([model(row[None, t - n :])[0] for row, n in zip(x, lengths, strict=True)])
        errors["alone"] = (error_exact(whole[real], alone, size), EXACT)
    return errors
