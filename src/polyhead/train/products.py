"""Float32 matrix products on a CPU by oneDNN, which is up to twice as fast as MKL on processors of AMD.

One switch of PyTorch selects oneDNN: `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`.  It also allows oneDNN to
round to bfloat16, as processors with AMX do.  So each process first compares one product with float64.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

SWITCH: Any = getattr(torch.backends.mkldnn, "matmul", None)
"""The object with `fp32_precision`; None if this torch has no such switch."""

STOCK, FAST = "ieee", "bf16"


@contextlib.contextmanager
def fast_products(enabled: bool = True) -> Iterator[bool]:
    """A context in which float32 matrix products on the CPU use oneDNN, if it is as exact as PyTorch's own choice.

    Yields whether oneDNN is used.  The setting is global to the process; the earlier one returns at the end.  Inside,
    `torch.get_float32_matmul_precision()` raises, and so do flex attention and max-autotune, which call it.
    """
    if SWITCH is None:
        yield False
        return
    is_fast = enabled and onednn_is_exact()
    before = SWITCH.fp32_precision
    SWITCH.fp32_precision = FAST if is_fast else STOCK
    try:
        yield is_fast
    finally:
        SWITCH.fp32_precision = before


@functools.cache
def onednn_is_exact() -> bool:
    """Is a product by oneDNN as exact as PyTorch's own on this processor?"""
    if getattr(torch.cpu, "_is_amx_tile_supported", bool)():  # rounds to bfloat16
        return False
    # A small product is enough: rounding to bfloat16 shows far above the effect of another order of sums.
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(512, 128, generator=generator, device="cpu", dtype=torch.float32)
    w = torch.randn(128, 384, generator=generator, device="cpu", dtype=torch.float32)
    exact = x.double() @ w.double()
    error_by_precision = {}
    before = SWITCH.fp32_precision
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for precision in (STOCK, FAST):
                SWITCH.fp32_precision = precision
                error_by_precision[precision] = float(((x @ w).double() - exact).norm())
    finally:
        SWITCH.fp32_precision = before
    return error_by_precision[FAST] <= 2 * error_by_precision[STOCK]
