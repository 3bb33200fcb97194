"""Relational attention by Triton kernels, for relations with any pointwise activation: memory O(t).

    forward    retrieved_ih = sum_j a_hij symbols_jh         related_ih = sum_j a_hij act(u_ij)    and top_ih, share_ih
    backward   p = exp(scores - top) share                   delta_ih = dretrieved . retrieved + drelated . related
               da_hij = dretrieved_ih . symbols_jh + drelated_ih . act(u_ij)         ds = p (da - delta)
               du_ij = act'(u_ij) sum_h p_hij drelated_ih
               then dq and dq_rel by programs that own queries; dk, dk_rel and dsymbols by programs that own keys

The softmax runs online, with statistics in at least float32.  Autograd differentiates the map from relations to a
head's output.  One program holds all heads of a tile, because they share the relations and du sums over them.  There
are no atomics: gradients are deterministic.  The gradient of a bias by offset is summed per tile of 16 queries, which
takes a sixteenth of a dense gradient's memory.

No GPU has run this yet: it is checked by Triton's interpreter and by compiling it.  Altabaa and Lafferty 2024
(arXiv 2405.16727).
"""

from dataclasses import replace
from typing import Any

import torch
from einops import einsum
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.cards import faster, shared_memory, without_triton
from polyhead.ops.custom_op_rules import Gradients, Kernel, backward_only, custom_op
from polyhead.ops.first_use import FirstUse
from polyhead.ops.latent_code import at_least_float32, retrieved_and_related, wide
from polyhead.ops.tiles import dense_limits, mask_of_keys

WIDEST = 128
"""The largest width of a head, a symbol or a relation; with twice this width the kernels spill their registers."""


def unsupported_reason(x: AttentionCall) -> str | None:
    """Why the kernels cannot take the inputs, or None."""
    if (reason := without_triton(x)) is not None:
        return reason
    if x.act == "softmax":
        return "takes no relation_act='softmax'"
    if (reason := dense_limits(x) or backward_only(x)) is not None:
        return reason
    widest = max(a.shape[-1] for a in (x.q, x.symbols, x.q_rel) if a is not None)
    return (
        f"takes widths of heads, symbols and relations up to {WIDEST} only, not {widest}" if widest > WIDEST else None
    )


def preferred(x: AttentionCall) -> bool:
    """On a GPU, unless they were measured to be slower there.  The alternative is tiles in PyTorch.

    Not timed yet.  Tiles take a dozen launches each, with the activation in memory.  For relations without an
    activation "auto" prefers PyTorch's own attention.
    """
    return x.q.is_cuda and faster("relational", x)


def forward(x: AttentionCall, twice: bool = False) -> Tensor:
    """Relational attention by Triton kernels, with gradients of everything but masks.

    If `twice`, PyTorch's own operations compute second derivatives.
    """
    retrieved, related, _ = _op(replace(x, relation_weight=None), twice)
    return retrieved + einsum(x.relation_map, related, "h e r, b t h r -> b t h e")


def _call(x: AttentionCall) -> Any:
    """The call, prepared for the kernels."""
    from polyhead.ops.relational.triton.launches import RelationalKernelCall
    from polyhead.ops.triton_tiles import limits, rowwise

    q, k, q_rel, k_rel, symbols = map(rowwise, (x.q, x.k, *x.related, x.symbols))
    by_offset = symbols.ndim == 3
    symbols = symbols.expand(q.shape[0], *symbols.shape) if by_offset else symbols
    bias = None if x.bias is None else x.bias.contiguous()
    masks, shared = limits(mask_of_keys(x), x.cu_seqlens, x.window, q.shape[1]), shared_memory(q.device)
    return RelationalKernelCall(q, k, q_rel, k_rel, symbols, bias, masks, x.causal, x.factor, x.act, by_offset, shared)


def _like(x: AttentionCall) -> list[Tensor]:
    """Empty tensors for the sums over symbols (b t h e) and over relations (b t h r); the softmax's (b 2 h t)."""
    b, t, h, _ = x.q.shape
    softmax = x.q.new_empty(b, 2, h, t, dtype=at_least_float32(x.q.dtype))
    return [x.q.new_empty(b, t, h, x.symbols.shape[-1]), x.q.new_empty(b, t, h, x.related[0].shape[2]), softmax]


def _forward(x: AttentionCall) -> list[Tensor]:
    from polyhead.ops.relational.triton.launches import forward_launches, shares, together

    out, call = _like(x), _call(x)
    n = shares(call)
    parts = out
    if n > 1:
        parts = [a.new_empty((n * len(a), *a.shape[1:]), dtype=out[2].dtype) for a in out]
    with torch.cuda.device_of(x.q):
        for launch in forward_launches(call, parts, n):
            launch()
    if n > 1:
        together(parts, n, out)
    return out


def _backward(x: AttentionCall, douts: list[Tensor]) -> Gradients:
    from polyhead.ops.relational.triton.launches import OutputGradients, PartialGradients, backward_launches

    dretrieved, drelated, _, retrieved, related, softmax = douts
    dretrieved, drelated = dretrieved.contiguous(), drelated.contiguous()
    delta = (wide(dretrieved) * retrieved).sum(-1) + (wide(drelated) * related).sum(-1)
    above = OutputGradients(dretrieved, drelated, softmax, delta.transpose(1, 2).contiguous())
    call = _call(x)
    grads = PartialGradients.empty(call)
    with torch.cuda.device_of(x.q):
        for launch in backward_launches(call, above, grads):
            launch()
    return dict(zip(("q", "k", "q_rel", "k_rel", "v", "bias"), grads.total(call), strict=False))


def _again(x: AttentionCall) -> list[Tensor]:
    """All outputs of the kernels; the third is never differentiated."""
    return [*retrieved_and_related(x), _like(x)[2].zero_()]


_op = custom_op(
    Kernel("relational", "triton", _forward, _backward, _like, _again, saves_outputs=True, guard=FirstUse(2))
)
