"""Cases of parity_jax.py whose scale is an array that learns."""

import parity_jax
from parity_cases import Case
from parity_measure import Outcome


def draw(seed: int, number: int) -> Case:
    case = parity_jax.draw(seed, number + 10_000)
    case.options.pop("scale", None)
    case.scaled, case.layouts = True, {**case.layouts, "scale": ("plain",)}
    case.learned = (*case.learned, "scale")
    return case


def check_number(seed: int, number: int) -> Outcome:
    """The outcome of case `number`."""
    return parity_jax.check(draw(seed, number), seed)
