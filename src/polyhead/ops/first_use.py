"""Check of the Triton kernels at their first use: do they agree with the reference on this GPU?

A configuration is an op's widths, dtype, options and layouts, and whether a call has one query, or as many queries or
keys as a check takes.  At its first call, at most 128 queries of two samples are computed twice: by the kernels, and in
float64 by PyTorch's own operations.  The first backward pass is checked in the same way.  A wrong configuration is
logged once.  Then impl="auto" computes it in tiles of the reference, and impl="triton" raises RuntimeError.  A kernel
that does not compile, or needs more shared memory than the GPU has, is treated in the same way.  POLYHEAD_TRITON=1
turns the checks off.
"""

import math
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from polyhead.ops import cards
from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import Gradients, Kernel, Outputs, learned, packed
from polyhead.ops.tiling import gradients_by_tiles, outputs_by_tiles

T = TypeVar("T")

ROWS, KEYS = 128, 256
"""The most queries and keys in a check; with ROWS queries it has at most ROWS keys.

ROWS are two chunks of linear attention, so that a state is read.  With more keys than that, several programs divide
the keys.
"""

SLACK = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}
"""Relative error allowed in addition to twice the error of PyTorch's own operations in the same dtype."""

VERDICTS: dict[Hashable, str | None] = {}
"""Configuration -> what is wrong with it, or None."""


def watched(x: AttentionCall) -> bool:
    """Is this call to be checked?"""
    return x.q.is_cuda and cards.MODE == "check"


def checkable(x: AttentionCall) -> bool:
    """Are there pairs, and may we synchronise the device?  Not while a CUDA graph is captured, after its warm-up."""
    return x.q.numel() * x.k.numel() > 0 and not (x.q.is_cuda and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True)
class FirstUse:
    """Checks the kernels of an op, whose first `count` outputs PyTorch's own operations compute, too."""

    count: int = 1

    def plain(self, kernel: Kernel) -> Callable[[AttentionCall], Outputs]:
        """These outputs by PyTorch's own operations."""
        return lambda x: kernel.anew(x)[: self.count]

    def forward(self, kernel: Kernel, x: AttentionCall, auto: bool) -> Outputs:
        """The outputs of `kernel`, or those of tiles of the reference if the kernel is wrong."""
        if not watched(x):
            return kernel.forward(x)
        done = self._run(kernel, x, "forward", lambda call: kernel.forward(call), auto)
        return outputs_by_tiles(self.plain(kernel), x, kernel.like(x)) if isinstance(done, str) else done

    def backward(self, kernel: Kernel, x: AttentionCall, douts: Outputs, auto: bool) -> Gradients:
        """The gradients of `kernel`, or those of tiles of the reference if the kernel is wrong."""
        if not watched(x):
            return kernel.backward(x, douts)
        if VERDICTS.get(_key(kernel, x, "forward")) is not None:  # the kernels cannot use outputs of tiles
            return gradients_by_tiles(self.plain(kernel), x, douts)
        done = self._run(kernel, x, "backward", lambda call: kernel.backward(call, douts), auto)
        return gradients_by_tiles(self.plain(kernel), x, douts) if isinstance(done, str) else done

    def _run(
        self, kernel: Kernel, x: AttentionCall, which: str, run: Callable[[AttentionCall], T], auto: bool
    ) -> T | str:
        """The result of `run`, or the reason why it must not be used."""
        key = _key(kernel, x, which)
        if key not in VERDICTS and checkable(x):
            verdict = _attempt(lambda: self._verdict(kernel, _part(x), which))
            self._tell(kernel, key, verdict, auto)
        if (found := VERDICTS.get(key)) is None:
            done = _attempt(lambda: run(x))
            if not isinstance(done, str):
                return done
            self._tell(kernel, key, found := done, auto)
        if not auto:
            raise RuntimeError(f"{kernel.who}: impl {kernel.impl!r} {found}; use impl='auto' or 'reference'")
        return found

    def _tell(self, kernel: Kernel, key: Hashable, found: str | None, auto: bool) -> None:
        VERDICTS[key] = found
        if found is not None and auto:
            told = f"{kernel.who}: impl {kernel.impl!r} {found}; tiles of the reference compute it instead"
            warnings.warn(told, RuntimeWarning, stacklevel=2)

    def _verdict(self, kernel: Kernel, x: AttentionCall, which: str) -> str | None:
        """Which output or gradient of a part of the call is wrong, in words, or None."""
        exact_call = x.of({name: a.double() for name, a in learned(x).items()})
        outs = kernel.forward(x)
        slow, count = self.plain(kernel), self.count
        if which == "forward":
            plain, exact = (outputs_by_tiles(slow, call, kernel.like(call)[:count]) for call in (x, exact_call))
            names, came = [f"output {n + 1}" for n in range(count)], outs[:count]
        else:
            douts = [_waves(out) if n < count else torch.zeros_like(out) for n, out in enumerate(outs)]
            grads = kernel.backward(x, [*douts, *outs] if kernel.saves_outputs else douts)
            names = list(grads)
            naive = gradients_by_tiles(slow, x, douts)
            right = gradients_by_tiles(slow, exact_call, [dout.double() for dout in douts])
            came, plain, exact = ([all_[name] for name in names] for all_ in (grads, naive, right))
            names = [f"the gradient of {name}" for name in names]
        for name, *three in zip(names, came, plain, exact, strict=True):
            error, allowed = _errors(three[0], three[1], three[2], x.q.dtype)
            if not error <= allowed:
                return f"is wrong on this card: {name} is {error:.1e} off, {allowed:.1e} are allowed ({x.q.dtype})"
        return None


def _errors(came: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The relative error of a result, and the largest allowed."""
    norm = exact.double().norm().item() or 1.0
    error, naive = ((x.double() - exact).norm().item() / norm for x in (came, plain))
    fast = dtype == torch.float32 and cards.tf32()
    slack = 2.0**-8 if fast else SLACK.get(dtype, 1e-9)
    return (error if math.isfinite(error) else math.inf), 2 * naive + slack


def _attempt(run: Callable[[], T]) -> T | str:
    """The result of `run`, or Triton's error as a part of a sentence."""
    try:
        return run()
    except Exception as error:
        if not type(error).__module__.startswith("triton") and "PassManager" not in str(error):
            raise
        return f"cannot be launched on this card ({type(error).__name__}: {str(error).strip().splitlines()[0][:120]})"


def _key(kernel: Kernel, x: AttentionCall, which: str) -> Hashable:
    """The configuration of a call: everything that is compiled in, and the layout of its tensors."""
    tensors, fixed = packed(x)
    widths = tuple((a.shape[2:] if a.ndim > 2 else a.ndim, a.ndim, _layout(a)) for a in tensors)
    limits = tuple((a.ndim, a.shape[:1] == (1,), _layout(a), a.numel() > 0) for a in fixed)
    fast = x.q.dtype == torch.float32 and cards.tf32()
    n, m = _sizes(x)
    lengths = n == 1, n == ROWS, m > ROWS or n == m == ROWS
    options = x.causal, x.window is None, x.normalise, x.act, fast
    return kernel.op, which, x.q.device, x.q.dtype, widths, limits, lengths, options


def _sizes(x: AttentionCall) -> tuple[int, int]:
    """Queries and keys in a check of a call."""
    t, s = x.lengths
    return min(t, ROWS), min(s, KEYS if t < ROWS else ROWS)


def _layout(x: Tensor) -> tuple[bool, ...]:
    """Whether rows are contiguous and whether strides are multiples of 16: Triton specialises on both."""
    return x.is_contiguous(), x.stride(-1) == 1, all(n % 16 == 0 for n in x.stride()[:-1])


def _part(x: AttentionCall) -> AttentionCall:
    """A smaller call of the first rows, in the same layout; numbers that test little are replaced."""
    t, (n, m) = x.q.shape[1], _sizes(x)
    near = slice(t - n, t + m - 1)  # offsets
    own, other = (slice(2), slice(n)), (slice(2), slice(m))
    cut: dict[str, tuple[slice, ...]] = {"q": own, "k": other, "q_rel": own, "k_rel": other}
    cut |= {"v": (near,) if x.v.ndim == 3 else other, "bias": (slice(None), near)}
    first = {name: a[cut[name]] for name, a in learned(x).items() if name in cut}
    first = {name: a if _telling(a) else _waves(a) for name, a in first.items()}
    mask = None if x.mask is None else x.mask[:2] if x.mask.ndim == 4 else x.mask
    mask = None if mask is None else mask[..., :m]
    edges = None if x.cu_seqlens is None else x.cu_seqlens.clamp(max=n)
    return replace(x.of(first), mask=mask, cu_seqlens=edges)


def _telling(x: Tensor) -> bool:
    """Can these numbers test a kernel: are they finite and not all 0?"""
    return bool(x.isfinite().all() & x.any())


def _waves(like: Tensor) -> Tensor:
    """Numbers between -1 and 1 without repetition and without a random generator, in the layout of `like`."""
    waves = torch.arange(like.numel(), device=like.device).double().mul(0.7).sin().view(like.shape)
    return torch.empty_like(like).copy_(waves)
