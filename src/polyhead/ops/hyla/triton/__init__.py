"""HYLA on CUDA: the equations of ../blocked.py, tile by tile within one kernel, in three kernels.

A forward kernel, one for the gradients of queries and bias, one for those of keys and values; each recomputes the codes
it needs, so only the arguments are saved.  Nothing is added atomically: gradients are the same every time.  Schug et
al. 2024, "Attention as a hypernetwork", eq. 6.

The kernels (kernels.py) are imported where they run, as importing polyhead must not need triton.
"""

from typing import Any

import torch
from torch import Tensor

from polyhead.ops.custom_op_rules import backward_only, check_backward, no_second_derivative
from polyhead.ops.latent_code import Inputs
from polyhead.ops.tiles import dense_limits, refuse, shared_memory, without_triton
from polyhead.spec import ACTS, NORMALISE
from polyhead.spec.shapes import one_of

MOST = {2: (64, 2048), 4: (32, 1024), 8: (16, 256)}
"""Bytes of a number: most heads, and most heads times width of queries, padded to powers of two from 16 on."""

ROW, MEMORY = 1024, 160 << 10
"""Bytes of a row of queries, padded, that any card has room for; the shared memory that longer ones need."""


def refusal(inputs: Inputs) -> str | None:
    """Why the kernels do not take the inputs, in part of a line, or None if they do."""
    if (reason := without_triton(inputs)) is not None:
        return reason
    if inputs.normalise not in ("rms_heads", "identity", "softmax"):
        return f"takes normalise='rms_heads', 'identity' or 'softmax' only, not {inputs.normalise!r}"
    if inputs.act not in ("relu", "identity"):
        return f"takes act='relu' or 'identity' only, not {inputs.act!r}"
    if inputs.value_weight is not None:
        return "takes no value_weight"
    return (
        backward_only(inputs)
        or dense_limits(inputs)
        or _too_large(inputs.q)
        or too_large_for(inputs.q, shared_memory(inputs.q.device))
    )


def _row(q: Tensor) -> tuple[int, int]:
    """Heads and width of queries, padded as a program holds them."""
    h, d = (max(16, 1 << (n - 1).bit_length()) for n in q.shape[2:])
    return h, d


def _too_large(q: Tensor) -> str | None:
    (heads, width), (most_heads, most) = _row(q), MOST[q.itemsize]
    if heads <= most_heads and heads * width <= most:
        return None
    came = f"{q.shape[2]} x {q.shape[3]}"
    return f"takes at most {most_heads} heads and heads x width up to {most} (padded, {q.dtype}), not {came}"


def too_large_for(q: Tensor, shared: int) -> str | None:
    """Why queries have no room on a card with so many bytes of shared memory for a program, or None."""
    heads, width = _row(q)
    if heads * width * q.itemsize <= ROW or shared >= MEMORY:
        return None
    came = f"not {q.shape[2]} x {q.shape[3]} (padded, {q.dtype})"
    return f"takes heads x width up to {ROW // q.itemsize} on a card with {shared >> 10} KB of shared memory, {came}"


def worth(inputs: Inputs) -> bool:
    """On a GPU, in half precision or with short rows.

    No kernel has been timed yet: that they win is a count of multiplies and bytes, not a measurement.
    """
    heads, width = _row(inputs.q)
    return inputs.q.is_cuda and (inputs.q.itemsize == 2 or heads * width * inputs.q.itemsize <= ROW)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    normalise: str = "rms_heads",
    act: str = "relu",
    value_weight: Tensor | None = None,
) -> Tensor:
    """HYLA by kernels.  Gradients for q, k, v and bias; a second derivative is refused."""
    one_of("hyla", "normalise", normalise, NORMALISE)
    one_of("hyla", "act", act, ACTS)
    inputs = Inputs(q, k, v, bias, mask, keep, causal, normalise=normalise, act=act, value_weight=value_weight)
    refuse("hyla", "triton", refusal(inputs))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    look = None if mask is None else mask.reshape(-1, mask.shape[-1])
    options = {"causal": causal, "window": window or 0, "scale": scale, "normalise": normalise, "act": act}
    return torch.ops.polyhead.hyla_triton(q, k, v, bias, look, cu_seqlens, **options)


@torch.library.custom_op("polyhead::hyla_triton", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    look: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    causal: bool,
    window: int,
    scale: float,
    normalise: str,
    act: str,
) -> Tensor:
    from polyhead.ops.hyla.triton import kernels

    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "normalise": normalise, "act": act}
    with torch.cuda.device_of(q):
        return kernels.forward(kernels.prepare(q, k, v, bias, look, cu_seqlens, **options), kernels.Launch.__call__)


@_forward.register_fake
def _(q, k, v, bias, look, cu_seqlens, *, causal, window, scale, normalise, act):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("polyhead::hyla_triton_backward", mutates_args=())
def _backward(
    dout: Tensor,
    tensors: list[Tensor],
    look: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    causal: bool,
    window: int,
    scale: float,
    normalise: str,
    act: str,
) -> list[Tensor]:
    """Gradients of q, k, v and, if it is given, the bias."""
    from polyhead.ops.hyla.triton import kernels

    q, k, v, *bias = tensors
    given = q, k, v, bias[0] if bias else None, look, cu_seqlens
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "normalise": normalise, "act": act}
    with torch.cuda.device_of(q):
        return list(kernels.backward(kernels.prepare(*given, **options), dout, kernels.Launch.__call__))


@_backward.register_fake
def _(dout, tensors, look, cu_seqlens, *, causal, window, scale, normalise, act):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, bias, look, cu_seqlens = inputs
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(q, k, v, bias, look, cu_seqlens)


def _grad(ctx, dout):  # type: ignore[no-untyped-def]
    check_backward("hyla", "triton")
    *tensors, look, cu_seqlens = ctx.saved_tensors
    given = [x for x in tensors if x is not None]
    grads = torch.ops.polyhead.hyla_triton_backward(dout, given, look, cu_seqlens, **ctx.options)
    return *grads, *(None for _ in range(6 - len(grads)))


_forward.register_autograd(_grad, setup_context=_setup)
_backward.register_autograd(no_second_derivative("hyla", "triton"))
