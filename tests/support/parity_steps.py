"""Decoding steps of linear attention and HYLA against the oracle's whole pass, and tiled cross entropies.

A sequence is processed in pieces, each with the state after the previous one.  The output, the gradients through all
states, and the last state are compared.  Cross entropies have tiles of 1 to 4096 tokens and classes.  Errors and bounds
are those of parity_ops.py.
"""

import random

import parity_arrays
import parity_cases
import parity_entropy
import parity_mixtures as mixtures
import parity_ops
import torch
from oracle import ACTS
from parity_cases import Case
from parity_measure import EXACT, Outcome, error_exact, judged, outcome_of
from torch import Tensor

from polyhead.ops import hyla_step, linear_step


def draw(seed: int, number: int) -> Case:
    """Case `number`: of identities, causal, without what a state cannot have."""
    dice = random.Random(f"steps {seed} {number}")
    op = dice.choice(("linear", "hyla"))
    dtype = dice.choices(("float64", "float32", *parity_cases.HALF), (5, 2, 1, 1))[0]
    h = dice.choice((1, 2, 3, 4, 6))
    sizes = {"b": dice.choice((1, 1, 2, 3, 7)), "h": h, "g": dice.choice([n for n in range(1, h + 1) if h % n == 0])}
    sizes |= {name: dice.choice((1, 2, 3, 5, 8)) for name in "de"} | {"r": 1, "p": 1}
    sizes["t"] = sizes["s"] = dice.choice((1, 2, 3, 7, 16, 31, 64))
    case = Case(number, op, "steps", dtype, sizes, {"causal": True, "normalise": "identity", "act": "identity"})
    if dice.random() < 0.3:
        case.options["scale"] = dice.choice((1.0, 0.3, -0.4, 0.0))
    if op == "linear":
        case.options["act"] = dice.choice(parity_cases.ACTS)
        case.mask = dice.choice((None, None, (1, 1, 1, sizes["s"]), (sizes["b"], 1, 1, sizes["s"])))
    case.layouts = {n: parity_cases.draw_layout(dice, len(x)) for n, x in parity_cases.shapes_of(case).items()}
    names = [name for name in ("q", "k", "v") if dice.random() < 0.8]
    case.learned, case.sharp = tuple(names), dice.choice((0.1, 1.0, 3.0))
    return case


def run(case: Case, bases: dict[str, Tensor], pieces: list[tuple[int, int]]) -> tuple[list[Tensor], Tensor]:
    """Output and gradients, and the last state."""
    bases = parity_ops.learned(bases, case)
    x, options, dout = parity_arrays.arguments(case, bases)
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
    grads = parity_ops.gradients(whole, [bases[name] for name in case.learned], dout)
    return [whole.detach(), *grads], state.detach()


def last_state(case: Case, bases: dict[str, Tensor]) -> Tensor:
    x, options, _ = parity_arrays.arguments(case, bases)
    k, v = x["k"].double(), ACTS[options["act"]](x["v"].double())
    if case.op == "hyla":
        return torch.einsum("bjfc,bjfe,bjgd->bfcegd", k, v, k)
    look = options["mask"][:, 0, 0, :, None, None] if case.mask is not None else torch.ones(1)
    return torch.einsum("bjgd,bjge->bgde", k * look, v)


def check_number(seed: int, number: int) -> Outcome:
    """The outcome of case `number`; two of five are cross entropies."""
    if number % 5 < 2:
        return parity_entropy.check_number(seed, number)
    case = draw(seed, number)
    group, words = f"{case.op} steps {case.dtype}", str(case)

    def outcome() -> Outcome:
        bases = parity_arrays.arrays(case, seed)
        pieces = mixtures.cuts(random.Random(number), case.sizes["t"])
        came, state = run(case, bases, pieces)
        found, notes = parity_ops.compare(case, bases, came)
        if case.dtype == "float64":
            found["state"] = error_exact(state, wanted := last_state(case, bases), wanted.norm().item()), EXACT
        return judged(group, f"{words}, pieces {pieces}", found, notes)

    return outcome_of(group, words, outcome)
