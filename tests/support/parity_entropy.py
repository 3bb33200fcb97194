"""Tiled cross entropies against the oracle, and the predicted classes."""

import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import oracle
import torch
from parity_arrays import base_of, view
from parity_cases import HALF, Layout, draw_layout
from parity_measure import EXACT, Outcome, error, error_exact, judged, outcome_of
from parity_rounding import FACTOR, responses
from torch import Tensor
from torch.nn import functional as F

from polyhead.ops import chunked_cross_entropy, cross_entropy


@dataclass
class Entropy:
    number: int
    dtype: str
    t: int
    m: int
    c: int
    bias: bool
    factor: float
    chunk: int
    tile: int
    sharp: float
    layouts: dict[str, Layout]
    learned: tuple[str, ...]
    op: str = "cross entropy"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        bias = {"bias": (self.c,)} if self.bias else {}
        return {"x": (self.t, self.m), "weight": (self.c, self.m), **bias, "dout": (self.t,)}


def draw(seed: int, number: int) -> Entropy:
    dice = random.Random(f"entropy {seed} {number}")
    case = Entropy(
        number,
        dice.choices(("float64", "float32", *HALF), (5, 2, 1, 1))[0],
        dice.choice((0, 1, 2, 3, 7, 31, 64, 257)),
        dice.choice((1, 2, 5, 16, 64)),
        dice.choice((1, 2, 3, 17, 256, 1009, 5000)),
        dice.random() < 0.4,
        dice.choice((1.0, 1.0, 0.3, -2.0)),
        dice.choice((1, 2, 3, 7, 64, 4096)),
        dice.choice((1, 30, 1000, 2**21)),
        dice.choice((0.1, 1.0, 5.0)),
        {},
        (),
    )
    case.chunk = max(case.chunk, case.c // 100)  # tiles cost time
    case.tile = max(case.tile, case.t * case.c // 300)
    case.layouts = {name: draw_layout(dice, len(shape)) for name, shape in case.shapes.items()}
    case.learned = tuple(name for name in case.shapes if name != "dout" and dice.random() < 0.8)
    return case


def run(case: Entropy, bases: dict[str, Tensor], targets: Tensor, f: Any) -> list[Tensor]:
    leaves = {name: x.clone().requires_grad_(name in case.learned) for name, x in bases.items()}
    x = {name: view(leaf, case.layouts[name], case.shapes[name]) for name, leaf in leaves.items()}
    out = f(x["x"], x["weight"], x.get("bias"), targets)
    learned = [leaves[name] for name in case.learned]
    grads = torch.autograd.grad(out, learned, x["dout"].to(out.dtype)) if learned else ()
    return [out.detach(), *grads]


def check_number(seed: int, number: int) -> Outcome:
    case = draw(seed, number)
    group = f"cross entropy {case.dtype}"
    numbers = torch.Generator().manual_seed(1_000_003 * seed + number)
    bases = {}
    for name, shape in case.shapes.items():
        x = torch.randn(base_of(case.layouts[name], shape), generator=numbers, dtype=torch.float64)
        bases[name] = (x * (case.sharp if name == "x" else 1.0)).to(getattr(torch, case.dtype))
    targets = torch.randint(case.c, (case.t,), generator=numbers)

    def outcome() -> Outcome:
        options = {"factor": case.factor, "chunk": case.chunk}
        with mock.patch.dict(cross_entropy.TILE, {"cpu": case.tile}):
            came = run(case, bases, targets, lambda *given: chunked_cross_entropy(*given, **options))
            guesses = cross_entropy.chunked_guesses(*_given(case, bases), targets, **options)[1]
        found, notes = compare(case, bases, targets, came)
        if case.dtype == "float64":
            x, weight, bias = _given(case, bases)
            logits = case.factor * (x @ weight.T + (0 if bias is None else bias))
            short = logits.amax(1) - logits.gather(1, guesses[:, None])[:, 0]
            found["guess"] = short.max().item() if case.t else 0.0, EXACT
        return judged(group, str(case), found, notes)

    return outcome_of(group, str(case), outcome)


def _given(case: Entropy, bases: dict[str, Tensor]) -> list[Tensor | None]:
    shapes = case.shapes
    return [view(bases[n], case.layouts[n], shapes[n]) if n in bases else None for n in ("x", "weight", "bias")]


def compare(
    case: Entropy, bases: dict[str, Tensor], targets: Tensor, came: list[Tensor]
) -> tuple[dict[str, tuple[float, float]], tuple[str, ...]]:
    """As parity_ops.compare; the reference is PyTorch's cross entropy, of as many tokens at a time as a tile has.

    A product with one row is another routine than one with many, which adds in another order: at 5,000 classes its
    error in float32 is up to three times as large.
    """
    names = ["output", *(f"d{name}" for name in case.learned)]
    numbers, unit = torch.Generator(), torch.finfo(getattr(torch, case.dtype)).eps

    def truth(seed: int | None) -> list[Tensor]:
        numbers.manual_seed(seed or 0)
        shaken = {
            name: x.double()
            if seed is None or name == "dout"
            else x.double() * (1 + unit * (torch.rand(x.shape, generator=numbers) - 0.5))
            for name, x in bases.items()
        }
        return run(case, shaken, targets, lambda *given: oracle.cross_entropy(*given, case.factor))

    def measure(x: list[Tensor]) -> list[float]:
        if case.dtype == "float64":
            return [error_exact(a, b, b.norm().item()) for a, b in zip(x, wanted, strict=True)]
        return [error(a, b) / (b.norm().item() + 1e-30) for a, b in zip(x, wanted, strict=True)]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        rows = max(1, case.tile // min(case.chunk, case.c))
        parts = zip(x.split(rows), targets.split(rows), strict=True)
        logits = ((F.linear(part, weight, bias).float() * case.factor, wanted) for part, wanted in parts)
        return torch.cat([F.cross_entropy(*pair, reduction="none") for pair in logits])

    if not case.t:
        return dict.fromkeys(names, (float(any(x.any() for x in came)), EXACT)), ()
    wanted = truth(None)
    errors, bounds = measure(came), [EXACT] * len(came)
    if case.dtype != "float64":
        own = [x if x < float("inf") else 0.0 for x in measure(run(case, bases, targets, plain))]
        shaken = measure(truth(case.number))
        bounds = [2 * max(x, y) + 3 * unit for x, y in zip(own, shaken, strict=True)]
    notes: tuple[str, ...] = ()
    if not all(x <= bound for x, bound in zip(errors, bounds, strict=True)):
        notes = ("conditioned",)
        moved = responses(case, lambda n: truth(case.number + n), measure)
        bounds = [max(bound, FACTOR * x) for bound, x in zip(bounds, moved, strict=True)]
    return dict(zip(names, zip(errors, bounds, strict=True), strict=True)), notes
