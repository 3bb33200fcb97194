"""Models of random mixtures: impl "auto", in tiles wherever possible, against "reference"; a batch against its samples;
packed sequences against single ones.  Outputs and the gradients of all parameters are compared.
"""

import random
from typing import Any

import parity_mixtures as mixtures
import torch
from parity_measure import EXACT, Outcome, error_exact, judged, outcome_of, patched
from torch import Tensor

PREFERRED = [
    "softmax_sdpa",
    "abstractor_sdpa",
    "relational_sdpa",
    "hyla_state",
    "hyla_blocked",
    "relational_blocked",
    "linear_chunked",
]
"""Files whose code "auto" takes here wherever it can, but for those that a case leaves out."""

TILES = {
    "hyla_blocked": ("QUERIES", "KEYS"),
    "relational_blocked": ("QUERIES",),
    "linear_chunked": ("CHUNK",),
    "hyla_state": ("SMALL", "LARGE"),
}


def check_number(seed: int, number: int) -> Outcome:
    """The outcome of case `number`."""
    dice = random.Random(f"models {seed} {number}")
    how = dice.choice(("impl", "impl", "batch", "packed"))
    settings = mixtures.draw(dice, causal=dice.random() < 0.5)
    b, t = dice.choice((1, 2, 3, 5)), dice.choice((1, 2, 5, 9, 16, 17, 31))
    changed = patches(dice)
    named = {name: x if isinstance(x, int) else x.__name__ for name, x in changed.items()}
    group, words = f"models {how}", f"{settings}, b {b}, t {t}, {named}"

    def run() -> Outcome:
        with patched(changed):
            x = mixtures.tokens(dice, b, t)
            errors = {"packed": packed, "batch": batch, "impl": impl}[how](settings, x, number, dice)
        return judged(group, words, errors)

    return outcome_of(group, words, run)


def patches(dice: random.Random) -> dict[str, Any]:
    """Which files are preferred, and the sizes of their tiles."""
    found: dict[str, Any] = {f"{file}.preferred": dice.choice((_yes, _yes, _no)) for file in PREFERRED}
    for file, names in TILES.items():
        found |= {f"{file}.{name}": dice.choice((1, 2, 3, 7, 64)) for name in names}
    for name in ("hyla_blocked.PAIRS", "relational_blocked.PAIRS", "hyla_blocked.ROWS", "relational_blocked.ROWS"):
        found[name] = max(1, int(2 ** dice.uniform(4, 17)))
    found["tiles.NARROW"] = dice.choice((16, 0, 64))
    return found


def _yes(call: object) -> bool:
    return True


def _no(call: object) -> bool:
    return False


def results(model: torch.nn.Module, out: Tensor, towards: Tensor) -> list[Tensor]:
    leaves = list(model.parameters())
    grads = torch.autograd.grad(out, leaves, towards, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True))]


def errors(came: list[Tensor], wanted: list[Tensor], towards: Tensor) -> dict[str, tuple[float, float]]:
    """Of the output, and the worst of the gradients."""
    size = towards.norm().item() * wanted[0].norm().item()
    found = [error_exact(x, y, size) for x, y in zip(came, wanted, strict=True)]
    return {"output": (found[0], EXACT), "dparameters": (max(found[1:]), EXACT)}


def impl(settings, x, number, dice):  # type: ignore[no-untyped-def]
    """ "auto" beside "reference"."""
    torch.manual_seed(number)
    towards = torch.randn(*x.shape, mixtures.VOCABULARY, dtype=torch.float64)
    mask = torch.tensor([[dice.random() < 0.8 for _ in row] for row in x]) if dice.random() < 0.3 else None
    model = mixtures.build(settings, number)
    plain = mixtures.build(mixtures.with_impl(settings, "reference"), number)
    came, wanted = (results(m, m(x, mask=mask), towards) for m in (model, plain))
    return errors(came, wanted, towards)


def batch(settings, x, number, dice):  # type: ignore[no-untyped-def]
    """All samples at once beside one after the other."""
    model = mixtures.build(settings, number)
    alone = torch.cat([model(row[None]) for row in x])
    towards = torch.randn_like(alone)
    return errors(results(model, model(x), towards), results(model, alone, towards), towards)


def packed(settings, x, number, dice):  # type: ignore[no-untyped-def]
    """Sequences one after the other in a single sample beside each alone; some have length 0 or 1."""
    model, t = mixtures.build(settings, number), x.shape[1]
    lengths = [t, *(dice.choice((0, 1, dice.randint(1, t))) for _ in x[1:])]
    rows = [row[:n][None] for row, n in zip(x, lengths, strict=True)]
    alone = torch.cat([model(row) for row in rows if row.shape[1]], 1)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    together = model(torch.cat(rows, 1), cu_seqlens=edges)
    towards = torch.randn_like(alone)
    return errors(results(model, together, towards), results(model, alone, towards), towards)
