"""Where the Triton kernels may run: is there a compiler, what card is it, and what does POLYHEAD_TRITON say.

check   (default) on the cards and with the compilers below, each configuration checked at its first use
1       wherever they can run at all, unchecked
0       nowhere
"""

import importlib.metadata
import importlib.util
import os
from typing import Any

import torch

from polyhead.ops.call import AttentionCall
from polyhead.spec.shapes import one_of

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Is there a compiler of kernels, and do they run in Python instead?  Read once, as a compiled model cannot ask."""

MODE = one_of("polyhead.ops", "POLYHEAD_TRITON", os.environ.get("POLYHEAD_TRITON", "check"), ("check", "1", "0"))

VERSION = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) if TRITON else (0, 0)
TRIED = (3, 6), (3, 9)
"""The compilers that kernels are given to, first and last.  They were compiled and emulated with 3.7; of the others the
first use of each configuration has to tell."""

CARDS = ((8, 0), (8, 6), (8, 9), (9, 0))
"""Compute capabilities that all kernels are compiled for, and fit into (benchmarks/ahead_of_time.py)."""


def without_triton(x: AttentionCall) -> str | None:
    """Why kernels in Triton cannot run on such tensors at all, or may not, or None."""
    if not TRITON:
        return "needs triton, which is not installed"
    if MODE == "0":
        return "is turned off by POLYHEAD_TRITON=0"
    if INTERPRETED:
        return None
    if not x.q.is_cuda:
        return "takes CUDA tensors only"
    if x.q.dtype == torch.float64:
        return "takes no torch.float64 on a card"
    return None if MODE == "1" else untried(x.q.device)


def untried(device: torch.device) -> str | None:
    """Why nobody can say that kernels are right on a card, or None.  Also of a model that is being compiled."""
    if torch.version.hip is not None:
        return "knows cards of NVIDIA only; POLYHEAD_TRITON=1 takes it nevertheless"
    if not TRIED[0] <= VERSION <= TRIED[1]:
        (a, b), (c, d), (e, f) = *TRIED, VERSION
        return f"knows triton {a}.{b} to {c}.{d}, not {e}.{f}; POLYHEAD_TRITON=1 takes it nevertheless"
    card = torch.cuda.get_device_properties(device)
    if (card.major, card.minor) in CARDS:
        return None
    known = ", ".join(f"{major}.{minor}" for major, minor in CARDS)
    came = f"not {card.major}.{card.minor}"
    return f"knows compute capabilities {known}, {came}; POLYHEAD_TRITON=1 takes it nevertheless"


def tf32() -> bool:
    """May products of float32 round to tf32?  `allow_tf32` cannot be asked: it raises once `fp32_precision` was set."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def shared_memory(device: torch.device) -> int:
    """Bytes of memory on the chip that a program of a kernel can have: 99 KB on most cards for games, 163 on an A100,
    227 on an H100, and where kernels run in Python.

    Read off the device, not the data, so that a compiled model may ask, too.
    """
    if device.type != "cuda":
        return 227 << 10
    card: Any = torch.cuda.get_device_properties(device)
    return getattr(card, "shared_memory_per_block_optin", 64 << 10)
