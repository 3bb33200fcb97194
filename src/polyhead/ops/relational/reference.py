"""Relational attention: a head retrieves symbols, and the relations of the receiver to the senders it attends to.

    out_ih  = sum_j a_hij symbols_jh + W_h sum_j a_hij rel_ij,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)
    rel_ijr = act(q_rel_ir . k_rel_jr / sqrt(p))                    r relations, the same for all heads

The features of the senders are never retrieved; only their relations to the receiver are.  Altabaa and Lafferty 2024,
"Disentangling and integrating relational and sensory information in transformer architectures" (arXiv 2405.16727).
"""

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Packed, Symbols
from polyhead.ops.dispatch import compute, load
from polyhead.ops.latent_code import allowed, code, drop, relations, retrieve
from polyhead.ops.precision import autocasting
from polyhead.spec.shapes import shaped


def reference(x: AttentionCall) -> Tensor:
    """The equation, literally."""
    x, (q_rel, k_rel) = x.masked(allowed(x)), x.related
    a, rel = drop(code(x), x.keep), relations(q_rel, k_rel, relation_act=x.act, mask=x.mask)
    related = einsum(a, rel, "b h t s, b r t s -> b t h r")
    return retrieve(a, x.symbols) + einsum(x.relation_map, related, "h e r, b t h r -> b t h e")


@shaped
@autocasting
def relational_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    q_rel: Float[Tensor, "b t r p"],
    k_rel: Float[Tensor, "b s r p"],
    symbols: Symbols,
    relation_weight: Float[Tensor, "h e r"],
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
    """Relational attention, `out_h = sum_s a_h symbols_h + W_h sum_s a_h act(q_rel k_rel)`.

    symbols: values by key, or by offset (row j - i + t - 1 for query i and key j); relation_act: spec.RELATION_ACTS, a
    softmax runs over the visible keys. `bias` and `mask` act on the scores; `keep` multiplies the code at both uses. A
    query without a visible key gets exactly 0. `window`: only keys less than `window` positions away; the last query is
    aligned with the last key. `cu_seqlens`: the single sample is several packed sequences, masked from one another.
    Raises ValueError if an explicit impl cannot take the inputs. Altabaa and Lafferty 2024.

    >>> relational_attention(q, k, q_rel, k_rel, symbols, relation_weight, causal=True)      # (b t h e)
    """
    x = AttentionCall(
        q, k, symbols, bias, mask, keep, causal, window, cu_seqlens, scale=scale,
        q_rel=q_rel, k_rel=k_rel, relation_weight=relation_weight, act=relation_act,
    )  # fmt: skip
    return compute("relational", impl, x)


load("relational")
