"""HYLA on CUDA: the equations of ../blocked.py in three Triton kernels.

One kernel computes the output, one the gradients of queries and bias, one those of keys and values.  Each recomputes
the codes, so only the arguments are saved.  There are no atomic additions: gradients are deterministic.  Schug et al.
2024, "Attention as a hypernetwork", eq. 6.

kernels.py is imported when a kernel runs, because polyhead must be importable without triton.
"""

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.cards import faster, shared_memory, tf32, without_triton
from polyhead.ops.custom_op_rules import Gradients, Kernel, backward_only, custom_op
from polyhead.ops.first_use import FirstUse
from polyhead.ops.tiles import dense_limits

LARGEST_HEADS = {2: (64, 2048), 4: (32, 1024), 8: (16, 256)}
"""Bytes of a number -> the most heads, and the most heads x width of queries; both are padded to powers of two >=
16."""

ROW, MEMORY = 1024, 160 << 10
"""Bytes of a padded row of queries that fit on every GPU, and the bytes of shared memory that longer rows need."""

TF32 = {1024: 112 << 10, 2048: 180 << 10, 4096: 208 << 10}
"""Largest bytes of a padded row of queries in tf32 -> the bytes of shared memory that it needs."""


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why the kernels do not take a call, as a part of a sentence, or None if they do."""
    return without_triton(x) or unsupported_anywhere(x) or too_large_for(x.q, shared_memory(x.q.device))


def unsupported_anywhere(x: AttentionCall) -> str | None:
    """Why the kernels take a call on no GPU, or None."""
    if x.normalise not in ("rms_heads", "identity", "softmax"):
        return f"takes normalise='rms_heads', 'identity' or 'softmax' only, not {x.normalise!r}"
    if x.act not in ("relu", "identity"):
        return f"takes act='relu' or 'identity' only, not {x.act!r}"
    if x.value_weight is not None:
        return "takes no value_weight"
    return backward_only(x) or dense_limits(x) or _too_large(x.q)


def _row(q: Tensor) -> tuple[int, int]:
    """Heads and width of queries, padded as in a program."""
    h, d = (max(16, 1 << (n - 1).bit_length()) for n in q.shape[2:])
    return h, d


def _too_large(q: Tensor) -> str | None:
    (heads, width), (most_heads, most) = _row(q), LARGEST_HEADS[q.itemsize]
    if heads <= most_heads and heads * width <= most:
        return None
    came = f"{q.shape[2]} x {q.shape[3]}"
    return f"takes at most {most_heads} heads and heads x width up to {most} (padded, {q.dtype}), not {came}"


def too_large_for(q: Tensor, shared: int) -> str | None:
    """Why queries do not fit on a GPU with `shared` bytes of shared memory per program, or None."""
    heads, width = _row(q)
    if q.dtype == torch.float32 and tf32():
        most = min(room for row, room in TF32.items() if heads * width * q.itemsize <= row)
        came = f"{q.shape[2]} x {q.shape[3]} in tf32 on a card with {shared >> 10} KB of shared memory"
        return f"takes no {came}" if shared < most else None
    if heads * width * q.itemsize <= ROW or shared >= MEMORY:
        return None
    came = f"not {q.shape[2]} x {q.shape[3]} (padded, {q.dtype})"
    return f"takes heads x width up to {ROW // q.itemsize} on a card with {shared >> 10} KB of shared memory, {came}"


def preferred(x: AttentionCall) -> bool:
    """On a GPU, unless they were measured to be slower there.  The alternative is tiles in PyTorch.

    Not timed yet.  The choice rests on counts: tiles launch thousands of kernels at t = 2048.
    """
    return x.q.is_cuda and faster("hyla", x)


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """HYLA by Triton kernels, with gradients of q, k, v and bias; if `twice`, second derivatives by the reference."""
    return _op(x, twice)[0]


def _forward(x: AttentionCall) -> list[Tensor]:
    from polyhead.ops.hyla.triton import kernels

    with torch.cuda.device_of(x.q):
        return [kernels.forward(kernels.prepare(x), kernels.Launch.__call__)]


def _backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    from polyhead.ops.hyla.triton import kernels

    with torch.cuda.device_of(x.q):
        grads = kernels.backward(kernels.prepare(x), douts[0], kernels.Launch.__call__)
    return dict(zip(("q", "k", "v", "bias"), grads, strict=False))


_op = custom_op(Kernel("hyla", "triton", _forward, _backward, guard=FirstUse()))
