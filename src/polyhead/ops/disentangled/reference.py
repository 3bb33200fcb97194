"""Disentangled relational cross-attention: attention selects, a relation of the head's own says what it means.

    out_ih  = sum_j a_hij rel_hij symbols_jh,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)
    rel_hij = act(q_rel_ih . k_rel_jh / sqrt(p))

The product form of relational attention (there the two are added, and relations are shared by the heads), from an
earlier draft of Altabaa and Lafferty 2024 (arXiv 2405.16727); with the relation 1 throughout it is softmax attention
to symbols.
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
    relate,
    retrieve,
    share,
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
    a = code(q, k, bias=bias, mask=look, scale=scale)
    inner = einsum(q_rel * q_rel.shape[-1] ** -0.5, share(k_rel, q.shape[2]), "b t h p, b s h p -> b h t s")
    return retrieve(drop(a * relate(inner, relation_act, look), keep), symbols)


@shaped
@autocasting
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

    symbols: values by key, or by offset (row j - i + t - 1 is the symbol of key j for query i); relation_act:
    spec.RELATION_ACTS, a softmax runs over the keys a query may see. `bias` and `mask` act on the scores, `keep`
    multiplies the product. A query that may look nowhere gets exactly 0. `window`: only keys less than so many
    places away, the last query aligned with the last key; `cu_seqlens`: the one sample is several sequences, which
    do not see one another. ValueError if an explicit impl cannot take the inputs. Altabaa and Lafferty 2024, an
    earlier draft.

    >>> disentangled_attention(q, k, q_rel, k_rel, symbols, causal=True)      # (b t h e)
    """
    one_of("disentangled_attention", "relation_act", relation_act, RELATION_ACTS)
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
    inputs = Inputs(q, k, symbols, **limits, q_rel=q_rel, k_rel=k_rel, act=relation_act)
    run = choose("disentangled", impl, inputs)
    return run(q, k, q_rel, k_rel, symbols, **limits, relation_act=relation_act)


load("disentangled")
