"""The change of an equation's result when its steps are rounded: a bound for all code of that precision.

This is Monte Carlo arithmetic (Parker 1997).  The oracle runs in float64, forward and backward.  Each argument, the
result of each step, and each term of each sum get a random error of up to one rounding.  A gradient that is 0 by
cancellation then changes by roundings of the cancelling terms; a well-conditioned one by its own rounding.

In every other draw two steps are computed as in tiles and states.  A tile stores the log-sum-exp of a row of scores or
logits, and recomputes weights from it (FlashAttention, Dao et al. 2022), so its rounding grows with the scores.  A
state of HYLA stores the sum of k v k, one number for every triple of entries.  Gradients then sum over (g d) e numbers,
thousands where the equation sums over d or e, so for codes with a state each partial sum of a product is rounded, too.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import oracle
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agreement.cases import Case

DRAWS = 16
FACTOR = 4.0
"""Of the largest of DRAWS responses is allowed.

Errors of a code and responses are sums of the same kind: each rounding times its weight, at random.  A code in tiles
rounds what it makes twice, once per pass, and partial sums: a few times as many steps as the equation, a spread of at
most twice as much.  Were one number all there is, normal and of twice the spread, it would be above 4 times the largest
of 16 responses once in 2,000 cases; a norm of many numbers never.
"""

STATES = ("state", "auto")
LARGEST_STATE = 2**24
PART = 64
"""Terms between two roundings of a partial sum."""

SUMS = ("mm", "bmm", "addmm", "baddbmm", "sum", "mean", "_softmax_backward_data")
STEPS = (
    "add", "sub", "rsub", "mul", "div", "pow", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf", "tanh", "cumsum",
)  # fmt: skip
FUSED = ("_softmax", "gelu", "silu", "sigmoid")
BACKWARD = ("gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward")
STEPS = frozenset({*STEPS, *SUMS, *FUSED, *BACKWARD, *(f"{name}_" for name in STEPS)})


class Rounded(TorchDispatchMode):
    """In it every step of float64 is off by up to `unit` of itself, and so are the terms of sums.

    With `terms` they are cut instead: nearer to 0, by up to so much of themselves.  With `partial`, products of
    matrices add up their terms one after the other, and each partial sum is off, too.
    """

    def __init__(self, unit: float, seed: int, terms: float | None = None, *, partial: bool = False) -> None:
        super().__init__()
        self.partial = partial
        self.numbers = torch.Generator().manual_seed(seed)
        self.step, self.term = (-unit, unit), (-unit, unit) if terms is None else (-terms, 0.0)

    def off(self, x: Any, between: tuple[float, float]) -> Any:
        least, most = between
        if not isinstance(x, Tensor) or x.dtype != torch.float64 or least == most:
            return x
        factor = torch.rand(x.shape, generator=self.numbers, dtype=x.dtype)
        return x * factor.mul_(most - least).add_(1 + least)

    def summed(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y; one error of a part stands for those of its terms, sqrt(PART) times as large as one of them."""
        total = x[..., :PART] @ y[..., :PART, :]
        each = tuple(edge * PART**0.5 for edge in self.step)
        for at in range(PART, x.shape[-1], PART):
            total = self.off(total + x[..., at : at + PART] @ y[..., at : at + PART, :], each)
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SUMS:
            args = [self.off(x, self.term) for x in args]
        out = func(*args, **(kwargs or {}))
        if self.partial and name in ("mm", "bmm"):
            out = self.summed(*args)
        elif self.partial and name == "sum" and len(args) > 1:
            x, over = args[0], [n % args[0].ndim for n in args[1]]
            terms = x.movedim(over, list(range(-len(over), 0))).flatten(-len(over))
            out = self.summed(terms, terms.new_ones(terms.shape[-1], 1)).reshape(out.shape)
        if name not in STEPS:
            return out
        return out.copy_(self.off(out, self.step)) if name.endswith("_") else self.off(out, self.step)


def by_logarithm(x: Tensor, look: Tensor, dim: int) -> Tensor:
    """The oracle's softmax as exp(x - log sum exp x)."""
    if x.shape[dim] == 0:
        return x
    top = torch.where(look, x, -math.inf).amax(dim, keepdim=True).detach()
    top = torch.where(top > -math.inf, top, torch.zeros_like(top))
    total = torch.where(look, torch.exp(torch.where(look, x, top) - top), torch.zeros_like(x)).sum(dim, keepdim=True)
    z = torch.where(total > 0, total, torch.ones_like(total)).log() + top
    return torch.where(look, torch.exp(torch.where(look, x, z) - z), torch.zeros_like(x))


def entropy_by_logarithm(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, factor: float) -> Tensor:
    """The oracle's cross entropy; its gradient has the weights exp(l - log sum exp l)."""
    logits = factor * (x @ weight.T if bias is None else x @ weight.T + bias)
    fixed = logits.detach()
    top = fixed.amax(1, keepdim=True)
    z = torch.exp(fixed - top).sum(1, keepdim=True).log() + top
    change = (torch.exp(fixed - z) * (logits - fixed)).sum(1)  # 0, but for its gradient
    return z[:, 0] + change - logits.gather(1, targets[:, None])[:, 0]


def by_state(x: dict[str, Tensor], look: Tensor, options: dict[str, Any]) -> Tensor:
    """HYLA of identities: out_ihe = sum_dgc q_ihd (sum_r q_igrc) sum_j k_jgc v_jge k_jfd, f = h // (h / g)."""
    (h, d), g = x["q"].shape[2:], x["k"].shape[2]
    q = x["q"].unflatten(2, (g, h // g)) * (d**-0.5 if options.get("scale") is None else options["scale"])
    values = torch.einsum("bjgc,bjge->bjgce", x["k"], x["v"])
    state = torch.einsum("bij,bjgce,bjfd->bigcefd", look[:, 0].to(q.dtype), values, x["k"])
    networks = torch.einsum("bigc,bigcefd->biefd", q.sum(3), state)
    return torch.einsum("bifrd,biefd->bifre", q, networks).flatten(2, 3)


def has_state(case: Case) -> bool:
    if case.op != "hyla":
        return False
    plain = all(case.options.get(name) == "identity" for name in ("normalise", "act"))
    limited = case.bias or case.keep or case.edges or case.deep or case.options.get("window")
    b, _, t, s = case.shape
    g, d, e = (case.sizes[n] for n in "gde")
    shared = case.mask is None or len(case.mask) < 3 or case.mask[-3] == 1
    size = b * max(t, s) * (g * d) ** 2 * e
    return plain and not limited and shared and size <= LARGEST_STATE


@contextlib.contextmanager
def spelled(case: Case, draw: int) -> Iterator[None]:
    """Every other draw by the steps of tiles and states."""
    with contextlib.ExitStack() as stack:
        if draw % 2:
            stack.enter_context(mock.patch.object(oracle, "softmax", by_logarithm))
            stack.enter_context(mock.patch.object(oracle, "cross_entropy", entropy_by_logarithm))
            if has_state(case):
                stack.enter_context(mock.patch.dict(oracle.OPS, {"hyla": by_state}))
        yield


def responses(case: Any, truth: Callable[[int], list[Tensor]], measure: Callable[..., list[float]]) -> list[float]:
    """The largest of DRAWS, by quantity, as `measure` has it; `truth(n)` is the oracle's of arguments rounded anew."""
    dtype = torch.float64 if case.dtype == "float64" else torch.float32  # half precision counts in float32
    found: list[list[float]] = []
    for n in range(DRAWS):
        with spelled(case, n):
            state = n % 2 == 1 and has_state(case) and case.impl in STATES
            with Rounded(torch.finfo(dtype).eps / 2, case.number * DRAWS + n, partial=state):
                came = truth(n)
            found.append(measure(came))
    return [max(each) for each in zip(*found, strict=True)]
