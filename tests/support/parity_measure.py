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


def outcome_of(group: str, words: str, run: Callable[[], Outcome]) -> Outcome:
    """The outcome of `run` where memory that nothing was written to is NaN; "raised" if it raises anything."""
    try:
        with poisoned():
            return run()
    except Exception as trouble:
        return Outcome(group, words, "raised", detail=f"{type(trouble).__name__}: {str(trouble)[:500]}")


def judged(group: str, words: str, errors: dict[str, tuple[float, float]], notes: tuple[str, ...] = ()) -> Outcome:
    """Right or wrong, by bounds."""
    wrong = [f"{name}: {x:.2e} > {bound:.2e}" for name, (x, bound) in errors.items() if not x <= bound]
    return Outcome(group, words, "wrong" if wrong else "right", errors, ", ".join(wrong), notes)


@contextlib.contextmanager
def patched(patches: dict[str, int]) -> Iterator[None]:
    """Constants of the files of ops, for a while."""
    old = []
    for path, value in patches.items():
        file, name = path.split(".")
        module = importlib.import_module("polyhead.ops." + file.replace("_", "."))
        old.append((module, name, getattr(module, name)))
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in old:
            setattr(module, name, value)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nothing was written to is NaN."""
    plain = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def poison(make: Any) -> Any:
        def fill(*args: Any, **options: Any) -> Any:
            x = make(*args, **options)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return fill

    for name, make in plain.items():
        setattr(torch, name, poison(make))
    try:
        yield
    finally:
        for name, make in plain.items():
            setattr(torch, name, make)


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
