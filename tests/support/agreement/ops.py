"""Runs a case of cases.py: output and gradients of an op by an impl, against the oracle.

In float64 the error is that of measure.py.  In float32, bfloat16 and float16 it is the Frobenius norm of the
difference, divided by the norm of the truth: the oracle's float64 result for the same rounded arguments.  The bound is
twice the reference's own error in that dtype, or twice the effect of rounding the arguments (the change of the truth
under one random rounding of every argument), plus three roundings of the result.  The bound of the reference is sixteen
times the effect of rounding the arguments, plus that of its sums in float32.  If the truth is 0 by cancellation, eight
roundings of the gradient's contribution to the output are allowed.

An error above these bounds may still be an effect of rounding in the equation, which rounding.py measures for
every dtype.  Entries of the truth that are too large for float16 must be infinite in the result.
"""

import math
import os
import warnings
from dataclasses import replace

os.environ.setdefault("TRITON_INTERPRET", "1")

import oracle
import torch
from torch import Tensor

import agreement.arrays
import agreement.cases
from agreement.cases import Case
from agreement.measure import EXACT, Errors, Outcome, beyond, error, error_exact, judged, outcome_of, patched
from agreement.rounding import FACTOR, responses
from polyhead.ops.dispatch import PUBLIC, resolve

Bases = dict[str, Tensor]
SHAKES = 8
"""Random roundings of the arguments, at most."""


def gradients(out: Tensor, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    """One a leaf, 0 for those that the output does not depend on."""
    return [*torch.autograd.grad(out, leaves, dout.to(out.dtype), materialize_grads=True)] if leaves else []


def learned(bases: Bases, case: Case) -> Bases:
    return {name: x.clone().requires_grad_(name in case.learned) for name, x in bases.items()}


def call(case: Case, leaves: Bases, impl: str | None) -> tuple[Tensor, Tensor]:
    """The output by an impl, or by the oracle without one; and its gradient."""
    tensors, options, dout = agreement.arrays.arguments(case, leaves)
    if impl is None:
        return oracle.answer(case.op, tensors, options), dout
    return resolve(case.op)(*tensors.values(), **options, impl=impl), dout


def run(case: Case, bases: Bases, impl: str | None) -> list[Tensor]:
    """Output and gradients of the leaves that learn."""
    bases = learned(bases, case)
    before = [x._version for x in bases.values()]
    out, dout = call(case, bases, impl)
    found = [out.detach(), *gradients(out, [bases[name] for name in case.learned], dout)]
    assert [x._version for x in bases.values()] == before, "an argument was written to"
    return found


def truth(case: Case, bases: Bases) -> list[Tensor]:
    """The same by the oracle."""
    return run(case, {name: x if x.dtype == torch.bool else x.double() for name, x in bases.items()}, None)


def tangent(case: Case, bases: Bases, impl: str | None) -> list[Tensor]:
    """Output and its derivative along random directions of all leaves, forward."""
    numbers = torch.Generator().manual_seed(case.number)
    towards = {n: torch.randn(bases[n].shape, generator=numbers, dtype=torch.float64) for n in case.learned}
    leaves = {name: bases[name] for name in case.learned}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.func imports what torch deprecates
        return list(torch.func.jvp(lambda leaves: call(case, bases | leaves, impl)[0], (leaves,), (towards,)))


def rounded(case: Case, bases: Bases, seed: int) -> Bases:
    """Arguments in float64, each number off by up to one rounding of its dtype."""
    numbers = torch.Generator().manual_seed(seed)
    unit = torch.finfo(getattr(torch, case.dtype)).eps / 2
    exact = ("mask", "keep", "dout")
    return {
        name: x if name in exact else x.double() * (1 + unit * (2 * torch.rand(x.shape, generator=numbers) - 1))
        for name, x in bases.items()
    }


def scales(case: Case, bases: Bases, wanted: list[Tensor]) -> list[float]:
    """How large output and gradients are by their part in the whole: |out|, and |dout| |out| / |x|."""
    size = bases["dout"].double().norm().item() * wanted[0].norm().item()
    norms = [bases[name][bases[name].isfinite()].double().norm().item() for name in case.learned]
    return [wanted[0].norm().item(), *(size / (norm + 1e-30) for norm in norms)]


def names_of(case: Case) -> list[str]:
    return ["output", *(f"d{name}" for name in case.learned)]


def compare(case: Case, bases: Bases, came: list[Tensor]) -> tuple[Errors, tuple[str, ...]]:
    """Error and bound by quantity; of what the case is an example (see `judged`)."""
    wanted = truth(case, bases)
    sizes = scales(case, bases, wanted)
    for mine, exact in zip(came, wanted, strict=True):
        assert mine.shape == exact.shape, f"shape {tuple(mine.shape)} for {tuple(exact.shape)}"
        assert mine.dtype == getattr(torch, case.dtype), f"dtype {mine.dtype} for {case.dtype}"
    came = [summed(*each, case, bases) for each in zip(names_of(case), came, wanted, strict=True)]
    errors, notes = measured(case, came, wanted, sizes), []
    for shakes in range(1, SHAKES + 1):  # one is too few where a single pair decides
        tried = bounds(case, bases, wanted, sizes, shakes)
        found = dict(zip(names_of(case), zip(errors, tried, strict=True), strict=True))
        if all(x <= bound for x, bound in found.values()):
            break
    if any(beyond(x, y).any() for x, y in zip(came, wanted, strict=True)):
        notes.append("overflow")
    if not all(x <= bound for x, bound in found.values()):
        notes.append("conditioned")
        found = conditioned(case, bases, wanted, sizes, found)
    return found, tuple(notes)


def overflown(name: str, case: Case, bases: Bases) -> Tensor:
    """Of a leaf that is expanded, where torch adds up terms of which one, in truth, is too large for the dtype."""
    shapes = agreement.cases.shapes_of(case)
    apart = bases | {name: agreement.arrays.view(bases[name], case.layouts[name], shapes[name]).clone()}
    alone = replace(case, learned=(name,), layouts={**case.layouts, name: ("plain",)})
    terms, axis = truth(alone, apart)[1], case.layouts[name][1]
    return (terms.abs() > torch.finfo(bases[name].dtype).max).any(axis, keepdim=True)


def summed(name: str, came: Tensor, wanted: Tensor, case: Case, bases: Bases) -> Tensor:
    """The result, with the truth where torch itself made it infinite or NaN by a sum with a term that does not fit."""
    leaf = name.removeprefix("d")
    if name == "output" or came.isfinite().all() or case.layouts[leaf][0] != "expand":
        return came
    return torch.where(~came.isfinite() & overflown(leaf, case, bases), wanted.to(came.dtype), came)


def measured(case: Case, came: list[Tensor], wanted: list[Tensor], sizes: list[float]) -> list[float]:
    """Errors relative to the truth."""
    if case.dtype == "float64":
        return [error_exact(*each) for each in zip(came, wanted, sizes, strict=True)]
    wholes = [whole(*each, case.dtype) for each in zip(wanted, sizes, strict=True)]
    return [error(x, y) / size for x, y, size in zip(came, wanted, wholes, strict=True)]


def whole(wanted: Tensor, size: float, dtype: str) -> float:
    """The norm of an error is divided by this."""
    return wanted.norm().item() + torch.finfo(getattr(torch, dtype)).eps * size + 1e-30


def conditioned(case: Case, bases: Bases, wanted: list[Tensor], sizes: list[float], found: Errors) -> Errors:
    """The same errors; bounds are at least FACTOR times what roundings do to the equation (rounding.py)."""
    moved = responses(
        case,
        lambda n: truth(case, rounded(case, bases, case.number + n)),
        lambda shaken: measured(case, shaken, wanted, sizes),
    )
    return {name: (x, max(y, FACTOR * z)) for (name, (x, y)), z in zip(found.items(), moved, strict=True)}


def bounds(case: Case, bases: Bases, wanted: list[Tensor], sizes: list[float], shakes: int) -> list[float]:
    """Of what is well conditioned."""
    if case.dtype == "float64":
        return [EXACT] * len(wanted)
    unit = torch.finfo(getattr(torch, case.dtype)).eps
    budget = [0.0] * len(wanted)
    for n in range(shakes):
        shaken = truth(case, rounded(case, bases, case.number + n))
        budget = [max(error(x, y), z) for x, y, z in zip(shaken, wanted, budget, strict=True)]
    if case.impl == "reference":
        terms = max(1, bases["dout"].shape[0] * case.sizes["t"] * case.sizes["s"])
        sums = torch.finfo(torch.float32).eps * terms**0.5
        budget = [16 * x + sums * y.norm().item() for x, y in zip(budget, wanted, strict=True)]
    else:
        own = [error(x, y) for x, y in zip(run(case, bases, "reference"), wanted, strict=True)]
        budget = [2 * max(x if x < math.inf else 0.0, y) for x, y in zip(own, budget, strict=True)]
    found = []
    for y, allowed, size in zip(wanted, budget, sizes, strict=True):
        norm, of = y.norm().item(), whole(y, size, case.dtype)
        cancelled = norm < 0.3 * size / max(1, wanted[0].numel()) ** 0.5
        found.append((allowed + 3 * unit * norm + cancelled * 8 * unit * size) / of + 1e-30)
    return found


def check(case: Case, seed: int) -> Outcome:
    """Run the case."""
    group, words = f"{case.op} {case.impl} {case.dtype}", str(case)
    bases = agreement.arrays.arrays(case, seed)
    explicit = case.impl not in ("auto", "reference")
    try:
        with patched(case.patches):
            came = tangent(case, bases, case.impl) if case.odd == "jvp" else run(case, bases, case.impl)
    except ValueError as refusal:
        text = str(refusal)
        clear = text.startswith(f"{PUBLIC[case.op]}: impl '{case.impl}' ") and "\n" not in text
        if not clear or (case.simple and not (explicit and case.odd in ("keep", "jvp"))):
            raise  # a simple case is one that the impl says it takes
        return Outcome(group, words, "refused", detail=text)
    if case.odd == "keep" and explicit:
        return Outcome(group, words, "wrong", detail="keep requires a gradient, and nothing was refused")
    if case.odd == "jvp":
        wanted = tangent(case, bases, None)
        errors = [error_exact(x, y, y.norm().item()) for x, y in zip(came, wanted, strict=True)]
        return judged(group, words, {"output": (errors[0], EXACT), "tangent": (errors[1], EXACT)})
    return judged(group, words, *compare(case, bases, came))


def check_number(seed: int, number: int, *, small: bool = False, only: str = "") -> Outcome:
    """The outcome of case `number`."""
    case = agreement.cases.draw(seed, number, small=small, only=only)
    return outcome_of(f"{case.op} {case.impl} {case.dtype}", str(case), lambda: check(case, seed))
