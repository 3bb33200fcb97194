"""Shared by all parity campaigns: the outcome of a case, the measure of errors, temporarily changed constants.

The error in float64 is the largest difference of two numbers, divided by the largest number of their row (the last
axis), or by 1e-4 of the tensor's largest number if the row is close to 0.  So an error in a row of small numbers is
also found.  The error must be below 1e-9.

A gradient that is 0 by cancellation (for queries that see one key) has no relative error.  Its contribution to the
output has the size |dout| |out| / |x|; 1e-4 of that counts as its size.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

EXACT = 1e-9
ROW = 1e-4
NEARLY = 2**-6


@dataclass
class Outcome:
    """The outcome of a case: "right", "refused" in one line, "wrong" or "raised"; errors and bounds by quantity.

    `words` say what the case is, `group` what it is counted with.  `notes`: "conditioned" where the bound is that of an
    ill-conditioned equation, "overflow" where the truth has numbers that do not fit the dtype.
    """

    group: str
    words: str
    what: str = "right"
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    detail: str = ""
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.what in ("wrong", "raised")


Errors = dict[str, tuple[float, float]]
"""Error and bound of each quantity."""


def outcome_of(group: str, words: str, run: Callable[[], Outcome | Errors]) -> Outcome:
    """The outcome of `run`, or of its errors; "raised" if it raises anything."""
    try:
        with poisoned():
            found = run()
    except Exception as trouble:
        return Outcome(group, words, "raised", detail=f"{type(trouble).__name__}: {str(trouble)[:500]}")
    return found if isinstance(found, Outcome) else judged(group, words, found)


def judged(group: str, words: str, errors: Errors, notes: tuple[str, ...] = ()) -> Outcome:
    """Right or wrong, by bounds."""
    wrong = [f"{name}: {x:.2e} > {bound:.2e}" for name, (x, bound) in errors.items() if not x <= bound]
    return Outcome(group, words, "wrong" if wrong else "right", errors, ", ".join(wrong), notes)


@contextlib.contextmanager
def patched(patches: dict[str, int]) -> Iterator[None]:
    """Constants of the files of ops, and what they prefer, for a while."""
    with contextlib.ExitStack() as stack:
        for path, value in patches.items():
            file, name = path.split(".")
            module = importlib.import_module("polyhead.ops." + file.replace("_", "."))
            own = (lambda call, value=value: value) if name == "preferred" else value
            stack.enter_context(mock.patch.object(module, name, own))
        yield


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """A tail that a kernel forgets to write becomes NaN instead of whatever lay there."""

    def poison(make: Any) -> Any:
        def fill(*args: Any, **options: Any) -> Any:
            x = make(*args, **options)
            # What a compiler traces is no torch.Tensor: torch 2.11 has no way to put a number into it.
            traced = torch.compiler.is_compiling() or type(x) is not torch.Tensor
            if not (traced or x.is_meta) and x.is_floating_point():
                x.detach().fill_(float("nan"))  # which a leaf allows, too
            return x

        return fill

    with mock.patch.multiple(torch, empty=poison(torch.empty), empty_like=poison(torch.empty_like)):
        yield


def error_exact(came: Tensor, wanted: Tensor, scale: float) -> float:
    if not wanted.numel():
        return 0.0
    size = wanted.abs()
    floor = max(ROW * size.max().item(), ROW * scale / wanted.numel() ** 0.5, 1e-30)
    row = size.amax(-1, keepdim=True).clamp(min=floor) if size.ndim else size.clamp(min=floor)
    return torch.nan_to_num((came - wanted).abs() / row, nan=torch.inf).max().item()


def beyond(came: Tensor, wanted: Tensor) -> Tensor:
    """Where the truth does not fit the dtype of what came, or nearly so, which is infinite as it should be."""
    most = torch.finfo(came.dtype).max * (1 - NEARLY)
    return came.isinf() & (wanted.abs() > most) & (came.sign() == wanted.sign())


def error(came: Tensor, wanted: Tensor) -> float:
    """Norm of the difference, but for numbers that are `beyond`."""
    fits = ~beyond(came, wanted)
    difference = torch.where(fits, came.double(), 0) - torch.where(fits, wanted, 0)
    return torch.nan_to_num(difference.norm(), nan=torch.inf).item()
