"""Models of random mixtures for a parity campaign: heads, symbols, positions, windows, norms, in float64."""

import dataclasses
import itertools
import random
from typing import Any

import torch
from torch import Tensor

from polyhead import config
from polyhead.models.transformer import Transformer
from polyhead.spec import ACTS, NORMALISE

RELATION_ACTS = ("identity", "relu", "sigmoid", "tanh", "gelu", "silu", "softmax")
LENGTH = 48
VOCABULARY = 11


def symbols(dice: random.Random) -> Any:
    kind, shared, dim = dice.randrange(4), dice.random() < 0.5, dice.choice((None, 6))
    once = shared and dice.random() < 0.4
    if kind == 0:
        return config.SymbolicAttention(dim=dim, shared=shared, count=dice.choice((1, 5)), heads=None, once=once)
    if kind == 1:
        own = {"neighbours": dice.choice((1, 2, 3)), "relations": dice.choice((1, 4)), "normalise": dice.random() < 0.5}
        return config.RelationalSymbols(shared=shared, count=5, once=once, include_self=dice.random() < 0.5, **own)
    if kind == 2:
        return config.PositionSymbols(dim=dim, shared=shared)
    return config.RelativeSymbols(dim=dim, shared=shared, distance=dice.choice((None, 1, 3)))


def group(dice: random.Random, before: Any) -> Any:
    """A group of heads; it may take the queries and keys of the one before."""
    heads = dice.choice((1, 2, 2, 3, 4))
    kv_heads = dice.choice([None, *(n for n in range(1, heads + 1) if heads % n == 0)])
    how: dict[str, Any] = {"dim": dice.choice((2, 4, 6)), "value_dim": dice.choice((1, 3, 5))}
    if before is not None and dice.random() < 0.2:
        heads, kv_heads = before.heads, before.kv_heads
        how |= {"dim": before.dim, "share": True}
    how |= {"heads": heads, "kv_heads": kv_heads}
    kind = dice.choice(("Softmax", "Linear", "Linear", "Hyla", "Hyla", "Relational", "Disentangled", "Abstractor"))
    if kind == "Linear":
        how |= {"normalise": dice.choice((*NORMALISE, "identity", "identity")), "act": dice.choice(ACTS)}
    elif kind == "Hyla":
        how |= {"normalise": dice.choice(NORMALISE), "act": dice.choice(ACTS), "value_depth": dice.choice((1, 1, 2))}
    elif kind != "Softmax":
        how |= {"symbols": symbols(dice), "hidden": None if how.get("share") else dice.choice((None, None, 7))}
        how |= {"act" if kind == "Abstractor" else "relation_act": dice.choice(RELATION_ACTS)}
    if kind == "Relational":
        relations = dice.choice((1, 2, 3))
        how |= {"relations": relations, "relation_dim": dice.choice((1, 2, 4)), "symmetric": dice.random() < 0.3}
    return getattr(config, kind)(**how)


def mixture(dice: random.Random) -> list[Any]:
    groups: list[Any] = []
    for _ in range(dice.choice((1, 2, 2, 3))):
        groups.append(group(dice, groups[-1] if groups else None))
    return groups


def draw(dice: random.Random, *, causal: bool) -> config.TransformerConfig:
    """A model of one or two layers."""
    layers = dice.choice((1, 2, 2))
    heads = mixture(dice) if dice.random() < 0.6 else [mixture(dice) for _ in range(layers)]
    kinds = (
        None,
        config.Rotary(layout=dice.choice(("interleaved", "half"))),
        config.RelativeBias(8, 16, bidirectional=not causal),
        config.Alibi(),
        config.Learned(),
        config.Sinusoidal(),
    )
    forward = (config.Mlp(16), config.Swiglu(16), config.Experts(3, 2, hidden=8))
    return config.TransformerConfig(
        config.Tokens(VOCABULARY),
        config.Logits(VOCABULARY, tied=dice.random() < 0.3),
        dim=24,
        layers=layers,
        heads=heads,
        feedforward=dice.choice(forward),
        positions=dice.choice(kinds),
        max_length=LENGTH,
        causal=causal,
        window=dice.choice((None, None, 1, 2, 3, 7)),
        norm=dice.choice(("layer", "rms")),
        norm_order=dice.choice(("pre", "post")),
        qk_norm=dice.random() < 0.3,
        bias=dice.random() < 0.3,
    )


def build(settings: config.TransformerConfig, seed: int) -> Transformer:
    """Far from its initial parameters, where attention is nearly uniform."""
    torch.manual_seed(seed)
    model = Transformer(settings, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def with_impl(settings: config.TransformerConfig, impl: str) -> config.TransformerConfig:
    """The same model, computed by one impl throughout."""

    def changed(part: Any) -> Any:
        return dataclasses.replace(part, impl=impl) if isinstance(part, config.Mechanism) else [*map(changed, part)]

    heads = settings.heads
    return dataclasses.replace(settings, heads=changed(heads))


def tokens(dice: random.Random, b: int, t: int) -> Tensor:
    return torch.tensor([[dice.randrange(VOCABULARY) for _ in range(t)] for _ in range(b)])


def cuts(dice: random.Random, t: int) -> list[tuple[int, int]]:
    """A sequence in pieces: mostly token by token, after a prompt or not."""
    edges = sorted({0, t, *(dice.randint(0, t) for _ in range(dice.choice((1, 2, 5, t))))})
    return list(itertools.pairwise(edges))
