"""Decoding steps of linear attention and HYLA against the oracle's whole pass, and tiled cross entropies.

A sequence is processed in pieces, each with the state after the previous one.  The output, the gradients through all
states, and the last state are compared.  Cross entropies have tiles of 1 to 4096 tokens and classes.  Errors and bounds
are those of ops.py.
"""

import random
from typing import Any
from unittest import mock

import oracle
import torch
from torch import Tensor
from torch.nn import functional as F

import agreement.arrays
import agreement.cases
import agreement.models
import agreement.ops
from agreement.arrays import base_of, view
from agreement.cases import HALF, Case, draw_layout
from agreement.measure import EXACT, Errors, Outcome, error, error_exact, judged, outcome_of
from agreement.ops import Bases
from agreement.rounding import FACTOR, responses
from polyhead.ops import chunked_cross_entropy, cross_entropy, hyla_step, linear_step


def draw(seed: int, number: int) -> Case:
    """Case `number`: of identities, causal, without what a state cannot have."""
    dice = random.Random(f"steps {seed} {number}")
    op = dice.choice(("linear", "hyla"))
    dtype = dice.choices(("float64", "float32", *HALF), (5, 2, 1, 1))[0]
    h = dice.choice((1, 2, 3, 4, 6))
    sizes = {"b": dice.choice((1, 1, 2, 3, 7)), "h": h, "g": dice.choice([n for n in range(1, h + 1) if h % n == 0])}
    sizes |= {name: dice.choice((1, 2, 3, 5, 8)) for name in "de"} | {"r": 1, "p": 1}
    sizes["t"] = sizes["s"] = dice.choice((1, 2, 3, 7, 16, 31, 64))
    case = Case(number, op, "steps", dtype, sizes, {"causal": True, "normalise": "identity", "act": "identity"})
    if dice.random() < 0.3:
        case.options["scale"] = dice.choice((1.0, 0.3, -0.4, 0.0))
    if op == "linear":
        case.options["act"] = dice.choice(agreement.cases.ACTS)
        case.mask = dice.choice((None, None, (1, 1, 1, sizes["s"]), (sizes["b"], 1, 1, sizes["s"])))
    case.layouts = {n: draw_layout(dice, len(x)) for n, x in agreement.cases.shapes_of(case).items()}
    names = [name for name in ("q", "k", "v") if dice.random() < 0.8]
    case.learned, case.sharp = tuple(names), dice.choice((0.1, 1.0, 3.0))
    return case


def run(case: Case, bases: Bases, pieces: list[tuple[int, int]]) -> tuple[list[Tensor], Tensor]:
    """Output and gradients, and the last state."""
    bases = agreement.ops.learned(bases, case)
    x, options, dout = agreement.arrays.arguments(case, bases)
    outs, state, more = [], None, {"scale": options.get("scale")}
    for first, last in pieces:
        if case.op == "linear":
            mask = None if case.mask is None else options["mask"][..., first:last]
            more |= {"mask": mask, "act": options["act"]}
        step = linear_step if case.op == "linear" else hyla_step
        out, state = step(*(x[name][:, first:last] for name in "qkv"), state, **more)
        outs.append(out)
    whole = torch.cat(outs, 1)
    assert state is not None
    grads = agreement.ops.gradients(whole, [bases[name] for name in case.learned], dout)
    return [whole.detach(), *grads], state.detach()


def last_state(case: Case, bases: Bases) -> Tensor:
    x, options, _ = agreement.arrays.arguments(case, bases)
    k, v = x["k"].double(), oracle.ACTS[options["act"]](x["v"].double())
    if case.op == "hyla":
        return torch.einsum("bjfc,bjfe,bjgd->bfcegd", k, v, k)
    look = options["mask"][:, 0, 0, :, None, None] if case.mask is not None else torch.ones(1)
    return torch.einsum("bjgd,bjge->bgde", k * look, v)


def check_number(seed: int, number: int) -> Outcome:
    """The outcome of case `number`; two of five are cross entropies."""
    if number % 5 < 2:
        return check_entropy(seed, number)
    case = draw(seed, number)
    group, words = f"{case.op} steps {case.dtype}", str(case)

    def outcome() -> Outcome:
        bases = agreement.arrays.arrays(case, seed)
        pieces = agreement.models.cuts(random.Random(number), case.sizes["t"])
        came, state = run(case, bases, pieces)
        found, notes = agreement.ops.compare(case, bases, came)
        if case.dtype == "float64":
            found["state"] = error_exact(state, wanted := last_state(case, bases), wanted.norm().item()), EXACT
        return judged(group, f"{words}, pieces {pieces}", found, notes)

    return outcome_of(group, words, outcome)


# ------------------------------------------------------------------------------------------------------ cross entropies
def entropy_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    t, m, c = (case.sizes[x] for x in "tmc")
    return {"x": (t, m), "weight": (c, m), **({} if case.bias is None else {"bias": case.bias}), "dout": (t,)}


def draw_entropy(seed: int, number: int) -> Case:
    dice = random.Random(f"entropy {seed} {number}")
    dtype = dice.choices(("float64", "float32", *HALF), (5, 2, 1, 1))[0]
    t, m = dice.choice((0, 1, 2, 3, 7, 31, 64, 257)), dice.choice((1, 2, 5, 16, 64))
    c, bias = dice.choice((1, 2, 3, 17, 256, 1009, 5000)), dice.random() < 0.4
    factor, chunk = dice.choice((1.0, 1.0, 0.3, -2.0)), dice.choice((1, 2, 3, 7, 64, 4096))
    tile, sharp = dice.choice((1, 30, 1000, 2**21)), dice.choice((0.1, 1.0, 5.0))
    chunk, tile = max(chunk, c // 100), max(tile, t * c // 300)  # tiles cost time
    case = Case(number, "cross entropy", "tiles", dtype, {"t": t, "m": m, "c": c}, {"factor": factor, "chunk": chunk})
    case.bias, case.patches, case.sharp = (c,) if bias else None, {"TILE": tile}, sharp
    shapes = entropy_shapes(case)
    case.layouts = {name: draw_layout(dice, len(shape)) for name, shape in shapes.items()}
    case.learned = tuple(name for name in shapes if name != "dout" and dice.random() < 0.8)
    return case


def seen(case: Case, bases: Bases) -> list[Any]:
    """x, weight, bias, dout."""
    shapes = entropy_shapes(case)
    views = {name: view(base, case.layouts[name], shapes[name]) for name, base in bases.items()}
    return [views.get(name) for name in ("x", "weight", "bias", "dout")]


def run_entropy(case: Case, bases: Bases, targets: Tensor, f: Any) -> list[Tensor]:
    leaves = agreement.ops.learned(bases, case)
    *given, dout = seen(case, leaves)
    out = f(*given, targets)
    return [out.detach(), *agreement.ops.gradients(out, [leaves[name] for name in case.learned], dout)]


def check_entropy(seed: int, number: int) -> Outcome:
    case = draw_entropy(seed, number)
    group = f"cross entropy {case.dtype}"
    numbers = torch.Generator().manual_seed(1_000_003 * seed + number)
    bases = {}
    for name, shape in entropy_shapes(case).items():
        x = torch.randn(base_of(case.layouts[name], shape), generator=numbers, dtype=torch.float64)
        bases[name] = (x * (case.sharp if name == "x" else 1.0)).to(getattr(torch, case.dtype))
    targets = torch.randint(case.sizes["c"], (case.sizes["t"],), generator=numbers)

    def outcome() -> Outcome:
        x, weight, bias, _ = seen(case, bases)
        with mock.patch.dict(cross_entropy.TILE, {"cpu": case.patches["TILE"]}):
            came = run_entropy(case, bases, targets, lambda *given: chunked_cross_entropy(*given, **case.options))
            guesses = cross_entropy.chunked_guesses(x, weight, bias, targets, **case.options)[1]
        found, notes = compare_entropy(case, bases, targets, came)
        if case.dtype == "float64":
            logits = case.options["factor"] * (x @ weight.T + (0 if bias is None else bias))
            short = logits.amax(1) - logits.gather(1, guesses[:, None])[:, 0]
            found["guess"] = short.max().item() if len(targets) else 0.0, EXACT
        return judged(group, str(case), found, notes)

    return outcome_of(group, str(case), outcome)


def compare_entropy(case: Case, bases: Bases, targets: Tensor, came: list[Tensor]) -> tuple[Errors, tuple[str, ...]]:
    """As agreement.ops.compare; the reference is PyTorch's cross entropy, of as many tokens at a time as a tile has.

    A product with one row is another routine than one with many, which adds in another order: at 5,000 classes its
    error in float32 is up to three times as large.
    """
    unit, (factor, chunk) = torch.finfo(getattr(torch, case.dtype)).eps, case.options.values()

    def truth(arguments: Bases) -> list[Tensor]:
        wide = {name: x.double() for name, x in arguments.items()}
        return run_entropy(case, wide, targets, lambda *given: oracle.cross_entropy(*given, factor))

    def measure(x: list[Tensor]) -> list[float]:
        exact = case.dtype == "float64"
        sized = [(a, b, b.norm().item()) for a, b in zip(x, wanted, strict=True)]
        return [error_exact(a, b, size) if exact else error(a, b) / (size + 1e-30) for a, b, size in sized]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        rows = max(1, case.patches["TILE"] // min(chunk, case.sizes["c"]))
        parts = zip(x.split(rows), targets.split(rows), strict=True)
        logits = ((F.linear(part, weight, bias).float() * factor, wanted) for part, wanted in parts)
        return torch.cat([F.cross_entropy(*pair, reduction="none") for pair in logits])

    if not len(targets):
        return dict.fromkeys(agreement.ops.names_of(case), (float(any(x.any() for x in came)), EXACT)), ()
    wanted = truth(bases)
    errors, bounds = measure(came), [EXACT] * len(came)
    if case.dtype != "float64":
        own = [x if x < float("inf") else 0.0 for x in measure(run_entropy(case, bases, targets, plain))]
        shaken = measure(truth(agreement.ops.rounded(case, bases, case.number)))
        bounds = [2 * max(x, y) + 3 * unit for x, y in zip(own, shaken, strict=True)]
    notes: tuple[str, ...] = ()
    if not all(x <= bound for x, bound in zip(errors, bounds, strict=True)):
        notes = ("conditioned",)
        moved = responses(case, lambda n: truth(agreement.ops.rounded(case, bases, case.number + n)), measure)
        bounds = [max(bound, FACTOR * x) for bound, x in zip(bounds, moved, strict=True)]
    return dict(zip(agreement.ops.names_of(case), zip(errors, bounds, strict=True), strict=True)), notes
