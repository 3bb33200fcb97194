"""Where the Triton kernels may run, and where they are faster: Triton's version, the GPU, POLYHEAD_TRITON.

check   (default) on the GPUs and Triton versions below; each configuration is checked at its first use
1       wherever they can run, without checks
0       nowhere
"""

import importlib.util
import os
import re
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

from polyhead.ops.call import AttentionCall
from polyhead.spec.shapes import one_of


def version(spec: ModuleSpec | None) -> tuple[int, int]:
    """Triton's version, read from its text: its distribution has another name for ROCm, XPU and Windows.

    (0, 0) if there is no triton, or only a folder of that name.
    """
    text = Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    found = re.search(r"__version__ = ['\"](\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


VERSION = version(importlib.util.find_spec("triton"))
TRITON = VERSION > (0, 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Is Triton available, and is it interpreted?  Read once, because compiled code cannot query it."""

MODE = one_of("polyhead.ops", "POLYHEAD_TRITON", os.environ.get("POLYHEAD_TRITON", "check"), ("check", "1", "0"))

TRIED = (3, 6), (3, 9)
"""The first and the last supported version of Triton.  The kernels were compiled and emulated with 3.6 and 3.7;
for the others the check at first use decides."""

CARDS = ((8, 0), (8, 6), (8, 9), (9, 0))
"""Compute capabilities for which all kernels compile and fit into shared memory (benchmarks/ahead_of_time.py)."""

FASTER: dict[str, dict[tuple[str, str, bool], dict[int, int | None]]] = {}
"""Name of a GPU -> (op, "bf16", "fp32" or "tf32", is there one query) -> width of heads -> the fewest tokens (keys, if
there is one query) from which on the kernels were measured to be faster than all else; None: never.

`benchmarks/on_card.py --report` writes the entry of a GPU."""


def without_triton(x: AttentionCall) -> str | None:
    """Why Triton kernels cannot or must not run on these tensors, or None."""
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
    """Why the kernels are untested on a GPU, or None.  May be called while a model is being compiled."""
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


def faster(op: str, x: AttentionCall) -> bool:
    """Were the kernels measured to be faster on this GPU?  Where nothing was measured, True: only the check decides.

    A width that was not measured counts as the next larger one, and float16 as bfloat16.
    """
    if not FASTER or (rows := FASTER.get(torch.cuda.get_device_properties(x.q.device).name)) is None:
        return True
    kind = "bf16" if x.q.dtype.itemsize == 2 else "tf32" if tf32() else "fp32"
    t, s = x.q.shape[1], x.k.shape[1]
    widths = rows.get((op, kind, t == 1), {})
    width = min((w for w in widths if w >= x.q.shape[-1]), default=max(widths, default=0))
    fewest = widths.get(width)
    return fewest is not None and (s if t == 1 else t) >= fewest


def tf32() -> bool:
    """May products of float32 round to tf32?  Not read from `allow_tf32`: it raises once `fp32_precision` was set."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per program of a kernel: 99 KB on most consumer GPUs, 163 on an A100, 227 on an H100 and
    in the interpreter.

    It reads a property of the device and no data, so compiled code may call it.
    """
    if device.type != "cuda":
        return 227 << 10
    card: Any = torch.cuda.get_device_properties(device)
    return getattr(card, "shared_memory_per_block_optin", 64 << 10)
