"""Relational attention: what a head retrieves are symbols, and the relations of the receiver to what it looks at.

    out_ih  = sum_j a_hij symbols_jh + W_h sum_j a_hij rel_ij,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)
    rel_ijr = act(q_rel_ir . k_rel_jr / sqrt(p))                    r relations, the same for all heads

The sensory content of the senders never enters, only how the receiver compares with them.  Altabaa and Lafferty 2024,
"Disentangling and integrating relational and sensory information in transformer architectures" (arXiv 2405.16727).
"""

import functools
from typing import Any

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.dispatch import choose, load
from polyhead.ops.latent_code import (
    Bias,
    Inputs,
    Keep,
    Mask,
    Packed,
    Symbols,
    blank,
    drop,
    latent_code,
    relations,
    retrieve,
    visible,
)
from polyhead.ops.precision import autocasting
from polyhead.spec import RELATION_ACTS
from polyhead.spec.shapes import one_of, shaped

code = functools.partial(latent_code, normalise="softmax")
"""a (b h t s), of q, k and what limits a call."""


def reference(
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
    """The equation, as it stands."""
    look = visible(mask, causal, q.shape[1], k.shape[1], q.device, window=window, cu_seqlens=cu_seqlens)
    a = drop(code(q, k, bias=bias, mask=look, scale=scale), keep)
    rel = relations(q_rel, k_rel, relation_act=relation_act, mask=look)
    related = einsum(a, rel, "b h t s, b r t s -> b t h r")
    return retrieve(a, symbols) + einsum(relation_weight, related, "h e r, b t h r -> b t h e")


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

    symbols: values by key, or by offset (row j - i + t - 1 is the symbol of key j for query i); relation_act:
    spec.RELATION_ACTS, a softmax runs over the keys a query may see. `bias` and `mask` act on the scores, `keep`
    multiplies the code at both uses. A query that may look nowhere gets exactly 0. `window`: only keys less than so
    many places away, the last query aligned with the last key; `cu_seqlens`: the one sample is several sequences,
    which do not see one another. ValueError if an explicit impl cannot take the inputs. Altabaa and Lafferty 2024.

    >>> relational_attention(q, k, q_rel, k_rel, symbols, relation_weight, causal=True)      # (b t h e)
    """
    one_of("relational_attention", "relation_act", relation_act, RELATION_ACTS)
    limits: dict[str, Any] = {
        "bias": bias,
        "mask": mask,
        "causal": causal,
        "window": window,
        "cu_seqlens": cu_seqlens,
        "keep": keep,
        "scale": scale,
    }
    k, k_rel, symbols = blank(mask, k, k_rel, symbols)
    related = {**limits, "q_rel": q_rel, "k_rel": k_rel, "relation_weight": relation_weight, "act": relation_act}
    run = choose("relational", impl, Inputs(q, k, symbols, **related))
    return run(q, k, q_rel, k_rel, symbols, relation_weight, **limits, relation_act=relation_act)


load("relational")
