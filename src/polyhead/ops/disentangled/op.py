"""Disentangled relational cross-attention: the code selects a symbol, and the head's own relation multiplies it.

    out_ih  = sum_j a_hij rel_hij symbols_jh,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)
    rel_hij = act(q_rel_ih . k_rel_jh / sqrt(p))

This is the product form of relational attention; there symbols and relations are added, and all heads share the
relations.  It is from an earlier draft of Altabaa and Lafferty 2024 (arXiv 2405.16727).  If all relations are 1, it is
softmax attention to symbols.
"""

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Masks, Packed, Symbols
from polyhead.ops.dispatch import Op, run
from polyhead.ops.latent_code import code, drop, inner, relate, relation_mask, retrieve, share
from polyhead.ops.tiling import tiled
from polyhead.spec import mechanism
from polyhead.spec.shapes import shaped


def reference(call: AttentionCall) -> Tensor:
    """The equation, literally."""
    call = replace(call, masks=Masks(call.visible()))
    q_rel, k_rel = call.relation_qk
    products = inner(q_rel, share(k_rel, call.q.shape[2]), q_rel.shape[-1] ** -0.5)
    related_code = code(call) * relate(products, call.act, relation_mask(call))
    return retrieve(drop(related_code.to(call.q.dtype), call.keep), call.symbols)


DISENTANGLED = Op(
    row=mechanism("disentangled_attention"),
    reference=reference,
    backends={"blocked": tiled("disentangled_attention", reference)},
)


@shaped
def disentangled_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    q_rel: Float[Tensor, "b t h p"],
    k_rel: Float[Tensor, "b s g p"],
    symbols: Symbols,
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: float | None = None,
    keep: Keep | None = None,
    impl: str = "auto",
    relation_act: str = "identity",
) -> Float[Tensor, "b t h e"]:
    """Disentangled relational attention, `out_h = sum_s a_h act(q_rel_h k_rel_h) symbols_h`.

    `bias` and `mask` act on the scores.  A query without a visible key gets exactly 0.  Altabaa and Lafferty 2024, an
    earlier draft.  Other arguments and errors are those of `softmax_attention`.

    >>> disentangled_attention(q, k, q_rel, k_rel, symbols, causal=True)      # (b t h e)

    Args:
        symbols: Values by key, or by offset: row j - i + t - 1 is for query i and key j.
        keep: Multiplies the product of code and relation.
        relation_act: A name of `spec.RELATION_ACTS`; a softmax runs over the visible keys.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, symbols, bias, masks, keep, scale, impl, q_rel=q_rel, k_rel=k_rel, act=relation_act)
    return run(DISENTANGLED, call)
