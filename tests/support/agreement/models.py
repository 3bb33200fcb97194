"""Models of random mixtures beside themselves, in float64: outputs and, but for caches, gradients of all parameters.

models    impl "auto", in tiles wherever possible, against "reference"; a batch against its samples; packed sequences
          against single ones
cache     decoding in pieces with a cache against the full pass; padded rows of several lengths against each alone
across    encoders of random mixtures below decoders of random mixtures: the impls; padded sources and targets of
          several lengths in one batch against each pair alone; decoding with a cached source against the full pass
"""

import dataclasses
import itertools
import random
from typing import Any

import torch
from torch import Tensor

from agreement.measure import EXACT, Errors, Outcome, error_exact, outcome_of, patched
from polyhead import config
from polyhead.layers.cache import Cache
from polyhead.models.transformer import Transformer
from polyhead.spec import ACTS, NORMALISE

RELATION_ACTS = ("identity", "relu", "sigmoid", "tanh", "gelu", "silu", "softmax")
LENGTH = 48
VOCABULARY = 11

PREFERRED = (
    "softmax_sdpa", "abstractor_sdpa", "relational_sdpa", "hyla_state", "hyla_blocked", "relational_blocked",
    "linear_chunked",
)  # fmt: skip
"""Files whose code "auto" takes here wherever it can, but for those that a case leaves out."""

TILES = {
    "hyla_blocked": ("QUERIES", "KEYS"),
    "relational_blocked": ("QUERIES",),
    "linear_chunked": ("CHUNK",),
    "hyla_state": ("SMALL", "LARGE"),
}


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
    turned, near = config.Rotary(layout=dice.choice(("interleaved", "half"))), config.RelativeBias(8, 16, not causal)
    kinds = (None, turned, near, config.Alibi(), config.Learned(), config.Sinusoidal())
    forward = (config.Mlp(16), config.Swiglu(16), config.Experts(3, 2, hidden=8))
    ends = config.Tokens(VOCABULARY), config.Logits(VOCABULARY, tied=dice.random() < 0.3)
    how: dict[str, Any] = {"feedforward": dice.choice(forward), "positions": dice.choice(kinds)}
    how |= {"window": dice.choice((None, None, 1, 2, 3, 7)), "norm": dice.choice(("layer", "rms"))}
    how |= {"norm_order": dice.choice(("pre", "post")), "qk_norm": dice.random() < 0.3, "bias": dice.random() < 0.3}
    return config.TransformerConfig(*ends, dim=24, layers=layers, heads=heads, max_length=LENGTH, causal=causal, **how)


def build(settings: config.TransformerConfig, seed: int) -> Transformer:
    """Far from its initial parameters, where attention is nearly uniform."""
    torch.manual_seed(seed)
    model = Transformer(settings, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def computed_by(heads: Any, impl: str) -> Any:
    """The same heads, of every layer, computed by one impl."""
    alone = isinstance(heads, config.Mechanism)
    return dataclasses.replace(heads, impl=impl) if alone else [computed_by(each, impl) for each in heads]


def with_impl(settings: config.TransformerConfig, impl: str) -> config.TransformerConfig:
    """The same model, and the encoder that it may have, computed by one impl throughout."""
    found = dataclasses.replace(settings, heads=computed_by(settings.heads, impl))
    if settings.encoder is None:
        return found
    across = computed_by(settings.cross_heads, impl)
    return dataclasses.replace(found, encoder=with_impl(settings.encoder, impl), cross_heads=across)


def tokens(dice: random.Random, b: int, t: int) -> Tensor:
    return torch.tensor([[dice.randrange(VOCABULARY) for _ in range(t)] for _ in range(b)])


def cuts(dice: random.Random, t: int) -> list[tuple[int, int]]:
    """A sequence in pieces: mostly token by token, after a prompt or not."""
    edges = sorted({0, t, *(dice.randint(0, t) for _ in range(dice.choice((1, 2, 5, t))))})
    return list(itertools.pairwise(edges))


# --------------------------------------------------------------------------------------- impls, batches, packed rows
def check_models(seed: int, number: int) -> Outcome:
    """The outcome of case `number`."""
    dice = random.Random(f"models {seed} {number}")
    way = dice.choice((impl, impl, batch, packed))
    settings = draw(dice, causal=dice.random() < 0.5)
    b, t = dice.choice((1, 2, 3, 5)), dice.choice((1, 2, 5, 9, 16, 17, 31))
    changed = patches(dice)

    def run() -> Errors:
        with patched(changed):
            return way(settings, tokens(dice, b, t), number, dice)

    return outcome_of(f"models {way.__name__}", f"{settings}, b {b}, t {t}, {changed}", run)


def patches(dice: random.Random) -> dict[str, Any]:
    """Which files are preferred, and the sizes of their tiles."""
    found: dict[str, Any] = {f"{file}.preferred": dice.choice((True, True, False)) for file in PREFERRED}
    for file, names in TILES.items():
        found |= {f"{file}.{name}": dice.choice((1, 2, 3, 7, 64)) for name in names}
    for name in ("hyla_blocked.PAIRS", "relational_blocked.PAIRS", "hyla_blocked.ROWS", "relational_blocked.ROWS"):
        found[name] = max(1, int(2 ** dice.uniform(4, 17)))
    found["tiles.NARROW"] = dice.choice((16, 0, 64))
    return found


def results(model: torch.nn.Module, out: Tensor, towards: Tensor) -> list[Tensor]:
    leaves = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, leaves, towards, materialize_grads=True)]


def errors(came: list[Tensor], wanted: list[Tensor], towards: Tensor) -> Errors:
    """Of the output, and the worst of the gradients."""
    size = towards.norm().item() * wanted[0].norm().item()
    found = [error_exact(x, y, size) for x, y in zip(came, wanted, strict=True)]
    return {"output": (found[0], EXACT), "dparameters": (max(found[1:]), EXACT)}


def impls(settings: Any, number: int, x: Tensor, towards: Tensor, **given: Any) -> Errors:
    """ "auto" beside "reference"."""
    models = [build(each, number) for each in (settings, with_impl(settings, "reference"))]
    came, wanted = (results(model, model(x, **given), towards) for model in models)
    return errors(came, wanted, towards)


def impl(settings: Any, x: Tensor, number: int, dice: random.Random) -> Errors:
    torch.manual_seed(number)
    towards = torch.randn(*x.shape, VOCABULARY, dtype=torch.float64)
    mask = torch.tensor([[dice.random() < 0.8 for _ in row] for row in x]) if dice.random() < 0.3 else None
    return impls(settings, number, x, towards, mask=mask)


def batch(settings: Any, x: Tensor, number: int, dice: random.Random) -> Errors:
    """All samples at once beside one after the other."""
    model = build(settings, number)
    alone = torch.cat([model(row[None]) for row in x])
    towards = torch.randn_like(alone)
    return errors(results(model, model(x), towards), results(model, alone, towards), towards)


def packed(settings: Any, x: Tensor, number: int, dice: random.Random) -> Errors:
    """Sequences one after the other in a single sample beside each alone; some have length 0 or 1."""
    model, t = build(settings, number), x.shape[1]
    lengths = [t, *(dice.choice((0, 1, dice.randint(1, t))) for _ in x[1:])]
    rows = [row[:n][None] for row, n in zip(x, lengths, strict=True)]
    alone = torch.cat([model(row) for row in rows if row.shape[1]], 1)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    together = model(torch.cat(rows, 1), cu_seqlens=edges)
    towards = torch.randn_like(alone)
    return errors(results(model, together, towards), results(model, alone, towards), towards)


# --------------------------------------------------------------------------------------------------------------- caches
def check_cache(seed: int, number: int) -> Outcome:
    """The outcome of case `number`: "output" beside the full pass, "alone" each row beside itself without padding."""
    dice = random.Random(f"cache {seed} {number}")
    settings = draw(dice, causal=True)
    b, t = dice.choice((1, 2, 3)), dice.choice((1, 2, 5, 9, 16, 17, 31, 32, 40))
    pieces, how = cuts(dice, t), dice.choice(("whole", "ragged", "ragged"))
    group, words = f"cache {how} {type(settings.positions).__name__}", f"{settings}, b {b}, pieces {pieces}"
    return outcome_of(group, words, lambda: in_pieces(settings, tokens(dice, b, t), pieces, how, dice, number))


@torch.no_grad()
def in_pieces(settings, x, pieces, how, dice, number):  # type: ignore[no-untyped-def]
    model, (b, t) = build(settings, number), x.shape
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


# --------------------------------------------------------------------------------------------- from another sequence
def check_across(seed: int, number: int) -> Outcome:
    """The outcome of case `number`."""
    dice = random.Random(f"across {seed} {number}")
    way = dice.choice((impl_across, impl_across, batch_across, cache_across))
    settings = across(dice, causal=way is cache_across or dice.random() < 0.5)
    b, t, s = (dice.choice(sizes) for sizes in ((1, 2, 3), (1, 2, 5, 16, 17), (1, 2, 7, 16, 31)))
    changed = patches(dice)

    def run() -> Errors:
        with patched(changed):
            return way(settings, tokens(dice, b, t), tokens(dice, b, s), dice, number)

    how = way.__name__.removesuffix("_across")
    return outcome_of(f"across {how}", f"{settings}, b {b}, t {t}, s {s}, {changed}", run)


def across(dice: random.Random, *, causal: bool) -> config.TransformerConfig:
    """A decoder with an encoder of its own mixture; what looks across is a third."""
    reads, writes = draw(dice, causal=False), draw(dice, causal=causal)
    heads = mixture(dice)
    while any(isinstance(getattr(x, "symbols", None), config.RelativeSymbols) for x in heads):
        heads = mixture(dice)
    return dataclasses.replace(writes, encoder=reads, cross_heads=heads)


def masks(dice: random.Random, x: Tensor) -> Tensor:
    """Real tokens first, at least one, then padding."""
    return torch.arange(x.shape[1]) < torch.tensor([[dice.randint(1, x.shape[1])] for _ in x])


def impl_across(settings: Any, x: Tensor, source: Tensor, dice: random.Random, number: int) -> Errors:
    towards = torch.randn(*x.shape, VOCABULARY, dtype=torch.float64)
    mask, hidden = (masks(dice, y) if dice.random() < 0.5 else None for y in (x, source))
    return impls(settings, number, x, towards, mask=mask, source=source, source_mask=hidden)


def batch_across(settings: Any, x: Tensor, source: Tensor, dice: random.Random, number: int) -> Errors:
    model, mask, hidden = build(settings, number), masks(dice, x), masks(dice, source)
    pairs = [(x[n][mask[n]][None], source[n][hidden[n]][None]) for n in range(len(x))]
    alone = torch.cat([model(own, source=read)[0] for own, read in pairs])
    together = model(x, mask=mask, source=source, source_mask=hidden)[mask]
    towards = torch.randn_like(alone)
    return errors(results(model, together, towards), results(model, alone, towards), towards)


@torch.no_grad()
def cache_across(settings: Any, x: Tensor, source: Tensor, dice: random.Random, number: int) -> Errors:
    model, hidden = build(settings, number), masks(dice, source)
    whole, parts, kept = model(x, source=source, source_mask=hidden), [], Cache(settings.layers)
    encoded = model.encode(source, hidden)
    for first, last in cuts(dice, x.shape[1]):
        parts.append(model(x[:, first:last], encoded=encoded, source_mask=hidden, cache=kept))
    return {"output": (error_exact(torch.cat(parts, 1), whole, whole.norm().item()), EXACT)}
