"""Float32 matrix products on a CPU by oneDNN, if a measurement shows that it is faster than MKL and as exact.

    y = x w^T        gradient of x = g w        gradient of w = g^T x

PyTorch uses MKL, which reaches only half of the peak on some processors.  One switch selects oneDNN:

    torch.backends.mkldnn.matmul.fp32_precision = "bf16"

It also allows oneDNN to round factors to bfloat16.  A processor without bfloat16 instructions (AMX) still computes in
float32.  A processor with them rounds: errors are 1e-3, not 1e-7.  So each process first runs a check of some
milliseconds.  The switch is global to the process, so requests form a list: the last request holds, and after all have
ended the switch has its first value again.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.config import Run
from polyhead.train.messages import print_notice
from polyhead.train.world import World

SWITCH: Any = getattr(torch.backends.mkldnn, "matmul", None)
"""The object with `fp32_precision`; None if this torch has no such switch."""

STOCK, FAST = "ieee", "bf16"

SHAPE = 512, 128, 384
"""Rows, inputs and outputs of the layer whose products are checked."""

MARGIN = 1.2
"""The least speed-up.  oneDNN with AVX-512 is about twice as fast as MKL without AVX-512, and as fast as MKL with it.
The threshold lies between, so noise in timing does not change the choice between equal runs on one machine."""

DOUBT = 1.05, 1.45
"""Speed-ups between these are measured again with more repetitions."""

TURNS = 5


@dataclass(frozen=True)
class Products:
    """Whether float32 products are `fast` (oneDNN), and the reason; truthy if they are.

    >>> found = Products(False, "they are not faster here")
    >>> found, bool(found), str(found)
    (Products(fast=False, why='they are not faster here'), False, 'stock (they are not faster here)')
    """

    fast: bool
    why: str

    def __bool__(self) -> bool:
        return self.fast

    def __str__(self) -> str:
        return f"{'oneDNN' if self.fast else 'stock'} ({self.why})"


UNASKED = Products(False, "no others were requested")


# ------------------------------------------------------------------------------------------------------------ who wants
@contextlib.contextmanager
def fast_products(wanted: bool = True) -> Iterator[Products]:
    """A context in which float32 matrix products on the CPU use oneDNN, if it is faster on this machine and as exact.

    Yields a `Products`: whether oneDNN is used, and why.  `wanted`: False keeps PyTorch's own choice, also inside
    another `fast_products()`.  Other dtypes and devices are not affected.  The setting is global to the process: the
    context entered last holds, and the first value returns when all contexts have ended.  The first call in a process
    runs a check of some tens of milliseconds, during which products of other threads may be rounded.

    Inside, `torch.get_float32_matmul_precision()` raises, and so do flex attention and max-autotune, which call it.

    >>> with fast_products(wanted=False) as products:
    ...     print(products)
    stock (not wanted)
    """
    with using(found() if wanted else Products(False, "not wanted")) as products:
        yield products


_lock = threading.RLock()
_wishes: list[list[Products]] = []
_before = ""
"""The value of the switch before the first request."""


@contextlib.contextmanager
def using(products: Products) -> Iterator[Products]:
    """A context with this choice of float32 products, without a check."""
    global _before
    wish = [products]  # a list, compared by identity: equal requests may end in any order
    with _lock:
        if not _wishes:
            _before = _state()
        _wishes.append(wish)
        _obey()
    try:
        yield products
    finally:
        with _lock:
            _wishes[:] = [other for other in _wishes if other is not wish]
            _obey()


def _obey() -> None:
    wanted = FAST if in_force() else _before
    if SWITCH is not None and _state() != wanted:
        SWITCH.fp32_precision = wanted


def in_force() -> Products:
    """The current choice."""
    return _wishes[-1][0] if _wishes else UNASKED


def _state() -> str:
    return "" if SWITCH is None else str(SWITCH.fp32_precision)


# --------------------------------------------------------------------------------------------------------------- a run
def of_run(config: Run, device: torch.device, began: bool | None = None, *, speaks: bool = True) -> Products:
    """The products of a run: the machine's choice, or for a resumed run those it `began` with.

    So the losses of a resumed run are bitwise equal.  `began`: whether the products were fast; None without a
    checkpoint.  `speaks`: print a line if this machine does not support them.
    """
    if device.type != "cpu":
        return Products(False, f"on {device.type}")
    if not config.fast_products:
        return Products(False, "not wanted")
    if config.compile:  # the compiler may ask for the precision, which raises under the switch
        return Products(False, "the run is compiled")
    if began is False:
        return Products(False, "the run began with them")
    products = found()
    if began and not products and speaks:
        print_notice(
            f"{config.name}: it began with fast products, which this machine lacks, and continues with {products}"
        )
    return products


def agreed(own: Products, world: World) -> Products:
    """The choice that all processes of a run share: fast only if all have it."""
    if world.size == 1:
        return own
    all_can = world.sum(torch.tensor([float(own.fast)])).item() == world.size
    return own if all_can or not own else Products(False, "another process of the run has them")


# ------------------------------------------------------------------------------------------------------------ the check
def found() -> Products:
    """The result of the check, which runs once per process."""
    with _lock:
        own = _before if _wishes else _state()
        if own not in ("", "none", STOCK):
            return Products(False, f"fp32_precision was set to {own} by other code")
        return _found()


@functools.cache
def _found() -> Products:
    if SWITCH is None:
        return Products(False, f"torch {torch.__version__} has no such switch")
    if _rounds():
        return Products(False, "it would round to bfloat16: the processor has AMX")
    state, threads = _state(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return _compared(_operands())
    except RuntimeError as error:
        return Products(False, f"the check failed: {str(error).strip().splitlines()[0]}")
    finally:
        SWITCH.fp32_precision = state
        torch.set_num_threads(threads)


def _rounds() -> bool:
    """Whether the processor is known to multiply bfloat16 natively, so the check can be skipped."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def _operands() -> list[tuple[Tensor, Tensor]]:
    """The three products of a linear layer, and the scores of small heads."""
    rows, inputs, outputs = SHAPE
    generator = torch.Generator("cpu").manual_seed(0)
    x, w, g, q, k = (
        torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs), (64, 32, 16), (64, 16, 32))
    )
    return [(x, w.t()), (g, w), (g.t(), x), (q, k)]


def _compared(pairs: list[tuple[Tensor, Tensor]]) -> Products:
    """First compare errors against float64, then times."""
    stock, fast = _all(STOCK, pairs), _all(FAST, pairs)
    exact = [x.double() @ y.double() for x, y in pairs]
    errors = [[_error(*each) for each in zip(side, exact, strict=True)] for side in (stock, fast)]
    for own, other in zip(*errors, strict=True):
        if not other <= 2 * own:  # also rejects nan
            return Products(False, f"they would round: error {other:.1e} in place of {own:.1e}")
    if all(map(torch.equal, stock, fast)):
        return Products(False, "the switch changes nothing on this processor")
    gain = _gain(pairs)
    if not gain >= MARGIN:
        return Products(False, f"they are not faster here: {gain:.2f} times")
    return Products(True, f"{gain:.1f} times as fast here, error {max(errors[1]):.1e}")


def _error(came: Tensor, exact: Tensor) -> float:
    return float((came.double() - exact).norm() / exact.norm())


def _gain(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The speed-up, from the fastest of some repetitions each; of more if it is close to the threshold."""
    best, gain = {STOCK: float("inf"), FAST: float("inf")}, 0.0
    for _ in range(3):
        for _ in range(TURNS):
            for precision, seconds in best.items():
                best[precision] = min(seconds, _seconds(precision, pairs))
        gain = best[STOCK] / max(best[FAST], 1e-9)
        if not DOUBT[0] < gain < DOUBT[1]:
            break
    return gain


def _all(precision: str, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    SWITCH.fp32_precision = precision
    return [_multiply(x, y) for x, y in pairs]


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


# CPU time of this thread, which other processes do not increase.  On some systems its resolution is too coarse.
_clock = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-6 else time.perf_counter


def _seconds(precision: str, pairs: list[tuple[Tensor, Tensor]]) -> float:
    SWITCH.fp32_precision = precision
    began = _clock()
    for x, y in pairs:
        _multiply(x, y)
    return _clock() - began
