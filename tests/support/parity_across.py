"""Models that read another sequence: encoders of random mixtures below decoders of random mixtures, in float64.

"impl": "auto", in tiles wherever possible, against "reference".  "batch": padded sources and targets of several lengths
in one batch, against each pair alone.  "cache": decoding in pieces with a cached source, against the full pass.
Outputs are compared and, except for the cache, the gradients of all parameters.
"""

import dataclasses
import random
from typing import Any

import parity_mixtures as mixtures
import parity_models
import torch
from parity_measure import EXACT, Outcome, error_exact, judged, outcome_of, patched
from torch import Tensor

from polyhead import config
from polyhead.layers.cache import Cache


def draw(dice: random.Random, *, causal: bool) -> config.TransformerConfig:
    """A decoder with an encoder of its own mixture; what looks across is a third."""
    reads, writes = mixtures.draw(dice, causal=False), mixtures.draw(dice, causal=causal)
    across = mixtures.mixture(dice)
    while any(isinstance(getattr(x, "symbols", None), config.RelativeSymbols) for x in across):
        across = mixtures.mixture(dice)
    return dataclasses.replace(writes, encoder=reads, cross_heads=across)


def with_impl(settings: config.TransformerConfig, impl: str) -> config.TransformerConfig:
    found = mixtures.with_impl(settings, impl)
    across = [dataclasses.replace(x, impl=impl) for x in settings.layer_cross_heads(0)]
    return dataclasses.replace(found, encoder=mixtures.with_impl(settings.encoder, impl), cross_heads=across)


def check_number(seed: int, number: int) -> Outcome:
    """The outcome of case `number`."""
    dice = random.Random(f"across {seed} {number}")
    how = dice.choice(("impl", "impl", "batch", "cache"))
    settings = draw(dice, causal=how == "cache" or dice.random() < 0.5)
    b, t, s = (dice.choice(sizes) for sizes in ((1, 2, 3), (1, 2, 5, 16, 17), (1, 2, 7, 16, 31)))
    patches = parity_models.patches(dice)
    named = {name: x if isinstance(x, int) else x.__name__ for name, x in patches.items()}
    group, words = f"across {how}", f"{settings}, b {b}, t {t}, s {s}, {named}"

    def run() -> Outcome:
        with patched(patches):
            x, source = mixtures.tokens(dice, b, t), mixtures.tokens(dice, b, s)
            errors = {"impl": impl, "batch": batch, "cache": cache}[how](settings, x, source, dice, number)
        return judged(group, words, errors)

    return outcome_of(group, words, run)


def masks(dice: random.Random, x: Tensor) -> Tensor:
    """Real tokens first, at least one, then padding."""
    return torch.arange(x.shape[1]) < torch.tensor([[dice.randint(1, x.shape[1])] for _ in x])


def impl(settings: Any, x: Tensor, source: Tensor, dice: random.Random, number: int) -> dict[str, Any]:
    towards = torch.randn(*x.shape, mixtures.VOCABULARY, dtype=torch.float64)
    mask, hidden = (masks(dice, y) if dice.random() < 0.5 else None for y in (x, source))
    models = [mixtures.build(each, number) for each in (settings, with_impl(settings, "reference"))]
    came, wanted = (
        parity_models.results(m, m(x, mask=mask, source=source, source_mask=hidden), towards) for m in models
    )
    return parity_models.errors(came, wanted, towards)


def batch(settings: Any, x: Tensor, source: Tensor, dice: random.Random, number: int) -> dict[str, Any]:
    model, mask, hidden = mixtures.build(settings, number), masks(dice, x), masks(dice, source)
    pairs = [(x[n][mask[n]][None], source[n][hidden[n]][None]) for n in range(len(x))]
    alone = torch.cat([model(own, source=read)[0] for own, read in pairs])
    together = model(x, mask=mask, source=source, source_mask=hidden)[mask]
    towards = torch.randn_like(alone)
    found = (parity_models.results(model, out, towards) for out in (together, alone))
    return parity_models.errors(*found, towards)


@torch.no_grad()
def cache(settings: Any, x: Tensor, source: Tensor, dice: random.Random, number: int) -> dict[str, Any]:
    model, hidden = mixtures.build(settings, number), masks(dice, source)
    whole, parts, kept = model(x, source=source, source_mask=hidden), [], Cache(settings.layers)
    encoded = model.encode(source, hidden)
    for first, last in mixtures.cuts(dice, x.shape[1]):
        parts.append(model(x[:, first:last], encoded=encoded, source_mask=hidden, cache=kept))
    return {"output": (error_exact(torch.cat(parts, 1), whole, whole.norm().item()), EXACT)}
