"""Linear attention on the GPU: causal, by chunks, in Triton.

    S_n = sum over the chunks before n of k_j v_j^T                            one program per head walks along
    out_i = q_i S_n + sum_(own chunk, j <= i) (q_i . k_j) v_j                  one program per chunk and head

The backward pass is the same two kernels: the states are recomputed for dq, a second walk from behind gives those for
dk and dv.  States and sums are in at least float32, gradients are deterministic.  The activation of the values is
applied before.  No GPU has run this yet: it is checked by Triton's interpreter and by compiling it.
Yang et al. 2024, "Gated linear attention", sec. 2.
"""

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.custom_op_rules import backward_only, check_backward, no_second_derivative, vmapped
from polyhead.ops.latent_code import act as activation, emptied, sequence_of
from polyhead.ops.tiles import refuse, stateless, without_triton

CHUNK = 64
"""Queries per chunk."""


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why there is no state to carry, or no kernel to carry it, or None."""
    if (reason := without_triton(x)) is not None:
        return reason
    if (reason := stateless(x)) is not None:
        return reason
    return backward_only(x) if x.causal else "takes causal=True only"


def preferred(x: AttentionCall) -> bool:
    """On a GPU, from a few chunks on.  Nothing was measured there."""
    return x.q.is_cuda and x.q.shape[1] >= 4 * CHUNK


def forward(x: AttentionCall) -> Tensor:
    """Linear attention by kernels.  Gradients for q, k and v; a second derivative is refused."""
    refuse("linear_attention", "triton", unsupported_reason(x))
    k, v = emptied(x.mask, x.k), activation(x.act)(x.v)
    edges = x.q.new_empty(0, dtype=torch.int32) if x.cu_seqlens is None else x.cu_seqlens
    return torch.ops.polyhead.linear_triton(x.q, k, v, edges, scale=x.factor)


def _prepare(tensors: list[Tensor], edges: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Contiguous rows; the number of each row's sequence, unless there are no edges of any."""
    sequence = sequence_of(edges, tensors[0].shape[1]).to(torch.int32) if edges.numel() else None
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors], sequence


@torch.library.custom_op("polyhead::linear_triton", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, *, scale: float) -> Tensor:
    from polyhead.ops.linear.triton.kernels import forward_launches

    (q, k, v), sequence = _prepare([q, k, v], edges)
    # Queries before the first key are left out.
    out = (q.new_zeros if q.shape[1] > k.shape[1] else q.new_empty)(*q.shape[:3], v.shape[-1])
    with torch.cuda.device_of(q):
        for launch in forward_launches(q, k, v, sequence, out, scale=scale, chunk=CHUNK):
            launch()
    return out


@_forward.register_fake
def _(q, k, v, edges, *, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("polyhead::linear_triton_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from polyhead.ops.linear.triton.kernels import backward_launches

    grads = (
        torch.zeros_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
        torch.empty_like(v, memory_format=torch.contiguous_format),
    )
    (q, k, v, dout), sequence = _prepare([q, k, v, dout], edges)
    with torch.cuda.device_of(q):
        for launch in backward_launches((q, k, v, dout), sequence, grads, scale=scale, chunk=CHUNK):
            launch()
    return grads


@_backward.register_fake
def _(dout, q, k, v, edges, *, scale):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(*inputs)


def _grad(ctx, dout):  # type: ignore[no-untyped-def]
    check_backward("linear_attention", "triton")
    return *torch.ops.polyhead.linear_triton_backward(dout, *ctx.saved_tensors, **ctx.options), None


_forward.register_autograd(_grad, setup_context=_setup)
_forward.register_vmap(vmapped(_forward))
_backward.register_autograd(no_second_derivative("linear_attention", "triton"))
_backward.register_vmap(vmapped(_backward))
