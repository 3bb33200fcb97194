"""Every op and impl of JAX against the oracle: output and gradients, in 64 bits, some in float32.

Cases are the small ones of cases.py without memory layouts, which JAX does not have.  JAX compiles a program for
each case, with few optimisations.  Tiles have 1, 2, 3, 5 or 128 queries and keys.  Errors and bounds are those of
ops.py; float32 has the bounds of the reference.
"""

import os
import random
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import agreement.arrays
import agreement.cases
from agreement.cases import Case
from agreement.measure import Outcome, judged, outcome_of
from agreement.ops import compare
from polyhead import jaxside
from polyhead.jaxside import tiles
from polyhead.ops.dispatch import PUBLIC

IMPLS = {
    "softmax": ("auto", "blocked", "blocked", "sdpa", "reference"),
    "abstractor": ("auto", "blocked", "blocked", "sdpa", "reference"),
    **dict.fromkeys(("linear", "hyla", "relational", "disentangled"), ("auto", "blocked", "blocked", "reference")),
}


def draw(seed: int, number: int) -> Case:
    """Case `number`; the size of its tiles is its only patch."""
    case = agreement.cases.draw(seed, number, small=True)
    dice = random.Random(f"jax {seed} {number}")
    case.impl, case.dtype = dice.choice(IMPLS[case.op]), dice.choice(("float64",) * 6 + ("float32",))
    case.layouts = dict.fromkeys(case.layouts, ("plain",))
    case.patches = {"TILE": dice.choice((1, 2, 3, 5, 128))}
    if case.odd == "jvp":
        case.odd = ""
    if case.impl == "sdpa":
        case.keep, case.odd, case.learned = None, "", tuple(name for name in case.learned if name != "keep")
        case.by_offset, case.dtype = False, "float32"
        case.options |= {"act": "softmax"} if case.op == "abstractor" else {}
    return case


def run(case: Case, bases: dict[str, Tensor]) -> list[Tensor]:
    """Output and gradients of what learns."""
    fixed = {name: jnp.asarray(x.numpy()) for name, x in bases.items()}
    learns = {name: fixed[name] for name in case.learned}

    def f(learns: dict[str, Any]) -> Any:
        tensors, options = agreement.arrays.given(case, fixed | learns, jnp.asarray)
        return getattr(jaxside, PUBLIC[case.op])(*tensors.values(), **options, impl=case.impl)

    def both(learns: dict[str, Any], dout: Any) -> Any:
        out, pull = jax.vjp(f, learns)
        return out, pull(dout)[0]

    out, grads = jax.jit(both)(learns, fixed["dout"])
    return [torch.from_numpy(np.array(x)) for x in (out, *(grads[name] for name in case.learned))]


def check_number(seed: int, number: int) -> Outcome:
    """The outcome of case `number`."""
    return check(draw(seed, number), seed)


def check_learned(seed: int, number: int) -> Outcome:
    """The same where the scale is an array that learns."""
    case = draw(seed, number + 10_000)
    case.options.pop("scale", None)
    case.scaled, case.layouts, case.learned = True, {**case.layouts, "scale": ("plain",)}, (*case.learned, "scale")
    return check(case, seed)


def check(case: Case, seed: int) -> Outcome:
    """The outcome of a case."""
    group, bases = f"{case.op} {case.impl} {case.dtype}", agreement.arrays.arrays(case, seed)

    def outcome() -> Outcome:
        with jax.enable_x64(True), mock.patch.object(tiles, "TILE", case.patches["TILE"]):
            came = run(case, bases)
        plain = replace(case, impl="reference")  # whose bound is not another code's error
        return judged(group, str(case), *compare(plain, bases, came))

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return outcome_of(group, str(case), outcome)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
