"""Relational attention by kernels in Triton, for relations through any pointwise activation: memory grows with t.

    forward    retrieved_ih = sum_j a_hij symbols_jh         related_ih = sum_j a_hij act(u_ij)       and lse_ih
    backward   p = exp(scores - lse)                         delta_ih = dretrieved . retrieved + drelated . related
               da_hij = dretrieved_ih . symbols_jh + drelated_ih . act(u_ij)         ds = p (da - delta)
               du_ij = act'(u_ij) sum_h p_hij drelated_ih
               then dq and dq_rel by programs that own queries; dk, dk_rel and dsymbols by programs that own keys

The softmax runs online, with statistics in at least float32; the map from relations to a head's output is left to
autograd.  All heads of a tile lie in one program, because relations are shared by them and du sums over them.  That
fits without spilling, so that the symbols need no second kernel: one through PyTorch's own attention would make a
(t s) mask of every window, bias and packed sequence.  There are no atomics: gradients are deterministic.  The gradient
of a bias by offset is summed per tile of 16 queries, a sixteenth of a dense one.

No GPU has run this yet: it is checked by Triton's interpreter and by compiling it.  Altabaa and Lafferty 2024
(arXiv 2405.16727).
"""

from typing import Any

import torch
from einops import einsum
from torch import Tensor

from polyhead.ops.custom_op_rules import backward_only, check_backward, no_second_derivative, vmapped
from polyhead.ops.latent_code import Inputs, at_least_float32, wide
from polyhead.ops.tiles import dense_limits, given, refuse, shared_memory, without_triton
from polyhead.spec import RELATION_ACTS
from polyhead.spec.shapes import one_of

WIDEST = 128
"""Width of a head, of its symbols or of a relation, at most: twice that compiles to kernels that live in memory."""


def refusal(inputs: Inputs) -> str | None:
    """Why the kernels cannot take the inputs, or None."""
    if (reason := without_triton(inputs)) is not None:
        return reason
    if inputs.act == "softmax":
        return "takes no relation_act='softmax'"
    if (reason := dense_limits(inputs) or backward_only(inputs)) is not None:
        return reason
    widest = max(x.shape[-1] for x in (inputs.q, inputs.symbols, inputs.q_rel) if x is not None)
    return (
        f"takes widths of heads, symbols and relations up to {WIDEST} only, not {widest}" if widest > WIDEST else None
    )


def worth(inputs: Inputs) -> bool:
    """On a GPU, where the alternative is tiles: a dozen launches each, and the activation in memory.

    Nothing was measured there.  For relations without an activation "auto" asks PyTorch's own attention first.
    """
    return inputs.q.is_cuda


def forward(
    q: Tensor,
    k: Tensor,
    q_rel: Tensor,
    k_rel: Tensor,
    symbols: Tensor,
    relation_weight: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    relation_act: str = "identity",
) -> Tensor:
    """Relational attention by kernels.  Gradients for everything but masks; a second derivative is refused."""
    one_of("relational_attention", "relation_act", relation_act, RELATION_ACTS)
    inputs = Inputs(q, k, symbols, bias, mask, keep, causal, window, cu_seqlens, q_rel=q_rel, act=relation_act)
    refuse("relational_attention", "triton", refusal(inputs))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias, *limits = (q.new_empty(0) if x is None else x for x in (bias, mask, cu_seqlens))
    tensors = [q, k, q_rel, k_rel, symbols, bias]
    retrieved, related, _ = torch.ops.polyhead.relational_triton(
        tensors, limits, causal=causal, window=window, scale=scale, act=relation_act
    )
    return retrieved + einsum(relation_weight, related, "h e r, b t h r -> b t h e")


def _call(tensors: list[Tensor], limits: list[Tensor], options: dict[str, Any]) -> Any:
    """The arguments as the kernels take them."""
    from polyhead.ops.relational.triton.launches import Call
    from polyhead.ops.triton_tiles import limits as limits_of, rowwise

    q, k, q_rel, k_rel, symbols = map(rowwise, tensors[:5])
    by_offset = symbols.ndim == 3
    symbols = symbols.expand(q.shape[0], *symbols.shape) if by_offset else symbols
    bias, mask, cu_seqlens = given([tensors[5], *limits])
    mask = None if mask is None else mask.reshape(-1, mask.shape[-1]).contiguous()
    bias = None if bias is None else bias.contiguous()
    masks = limits_of(mask, cu_seqlens, options["window"], q.shape[1])
    causal, scale, act = (options[name] for name in ("causal", "scale", "act"))
    shared = shared_memory(q.device)
    return Call(q, k, q_rel, k_rel, symbols, bias, masks, causal, scale, act, by_offset, shared)


def _outputs(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, _, q_rel, _, symbols, _ = tensors
    b, t, h, _ = q.shape
    lse = q.new_empty(b, h, t, dtype=at_least_float32(q.dtype))
    return q.new_empty(b, t, h, symbols.shape[-1]), q.new_empty(b, t, h, q_rel.shape[2]), lse


@torch.library.custom_op("polyhead::relational_triton", mutates_args=())
def _forward(
    tensors: list[Tensor],
    limits: list[Tensor],
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    act: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k, q_rel, k_rel, symbols, bias; mask, cu_seqlens."""
    from polyhead.ops.relational.triton.launches import forward_launches

    out = _outputs(tensors)
    call = _call(tensors, limits, {"causal": causal, "window": window, "scale": scale, "act": act})
    with torch.cuda.device_of(out[0]):
        for launch in forward_launches(call, out):
            launch()
    return out


@_forward.register_fake
def _(tensors, limits, *, causal, window=None, scale, act):  # type: ignore[no-untyped-def]
    return _outputs(tensors)


@torch.library.custom_op("polyhead::relational_triton_backward", mutates_args=())
def _backward(
    douts: list[Tensor],
    outs: list[Tensor],
    tensors: list[Tensor],
    limits: list[Tensor],
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    act: str,
) -> list[Tensor]:
    """Gradients of q, k, q_rel, k_rel, symbols and bias; empty if there is no bias."""
    from polyhead.ops.relational.triton.launches import Above, Grads, backward_launches

    retrieved, related, lse = outs
    dretrieved, drelated = (x.contiguous() for x in douts)
    delta = (wide(dretrieved) * retrieved).sum(-1) + (wide(drelated) * related).sum(-1)
    above = Above(dretrieved, drelated, lse, delta.transpose(1, 2).contiguous())
    call = _call(tensors, limits, {"causal": causal, "window": window, "scale": scale, "act": act})
    grads = Grads.empty(call)
    with torch.cuda.device_of(retrieved):
        for launch in backward_launches(call, above, grads):
            launch()
    totals = [*grads.total(call), tensors[5].clone()][:6]  # a clone of an absent bias
    return [x.to(like.dtype) for x, like in zip(totals, tensors, strict=True)]


@_backward.register_fake
def _(douts, outs, tensors, limits, *, causal, window=None, scale, act):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(*output, *inputs[0], *inputs[1])


def _grad(ctx, dretrieved, drelated, dlse):  # type: ignore[no-untyped-def]
    check_backward("relational_attention", "triton")
    saved = list(ctx.saved_tensors)
    outs, tensors, limits = saved[:3], saved[3:9], saved[9:]
    douts = [dretrieved, drelated]
    grads = torch.ops.polyhead.relational_triton_backward(douts, outs, tensors, limits, **ctx.options)
    return grads, [None] * len(limits)


_forward.register_autograd(_grad, setup_context=_setup)
_backward.register_autograd(no_second_derivative("relational_attention", "triton"))
_forward.register_vmap(vmapped(_forward))
