"""Causal linear attention on the GPU, in chunks, by Triton kernels.

    S_n = sum over the chunks before n of k_j v_j^T                            one program per head walks along
    out_i = q_i S_n + sum_(own chunk, j <= i) (q_i . k_j) v_j                  one program per chunk and head

The backward pass uses the same two kernels: the states are recomputed for dq, and a walk in reverse order gives the
states for dk and dv.  States and sums are in at least float32; gradients are deterministic.  The activation of the
values is applied before the call.  No GPU has run this yet: it is checked by Triton's interpreter and by compiling it.
Yang et al. 2024, "Gated linear attention", sec. 2.
"""

from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.cards import faster, without_triton
from polyhead.ops.custom_op_rules import Gradients, Kernel, backward_only, custom_op, like_values
from polyhead.ops.first_use import FirstUse
from polyhead.ops.latent_code import act as activation, emptied, sequence_of
from polyhead.ops.tiles import stateless

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
    """On a GPU, for more than a few chunks, unless they were measured to be slower there.  Not timed yet."""
    return x.q.is_cuda and x.q.shape[1] >= 4 * CHUNK and faster("linear", x)


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """Linear attention by Triton kernels.  If `twice`, the reference computes second derivatives; otherwise they
    raise."""
    return _op(replace(x, k=emptied(x.mask, x.k), v=activation(x.act)(x.v), mask=None, act="identity"), twice)[0]


def _prepare(x: AttentionCall) -> tuple[list[Tensor], Tensor | None]:
    """q, k and v, prepared for the kernels, and for packed sequences the index of each row's sequence."""
    from polyhead.ops.triton_tiles import rowwise

    edges = x.cu_seqlens
    sequence = None if edges is None else sequence_of(edges, x.q.shape[1]).to(torch.int32)
    return [rowwise(a) for a in (x.q, x.k, x.v)], sequence


def _forward(x: AttentionCall) -> list[Tensor]:
    from polyhead.ops.linear.triton.kernels import forward_launches

    (q, k, v), sequence = _prepare(x)
    (out,) = like_values(x)
    if q.shape[1] > k.shape[1]:
        out.zero_()  # the kernels skip queries before the first key
    with torch.cuda.device_of(q):
        for launch in forward_launches(q, k, v, sequence, out, scale=x.factor, chunk=CHUNK):
            launch()
    return [out]


def _backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    from polyhead.ops.linear.triton.kernels import backward_launches
    from polyhead.ops.triton_tiles import rowwise

    (q, k, v), sequence = _prepare(x)
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.empty_like(a, memory_format=torch.contiguous_format) for a in (k, v))
    tensors, grads = (q, k, v, rowwise(douts[0])), (dq, dk, dv)
    with torch.cuda.device_of(q):
        for launch in backward_launches(tensors, sequence, grads, scale=x.factor, chunk=CHUNK):
            launch()
    return {"q": dq, "k": dk, "v": dv}


_op = custom_op(Kernel("linear", "triton", _forward, _backward, guard=FirstUse()))
