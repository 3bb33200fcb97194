"""Relational cross-attention of the Abstractor: attention whose values are symbols.

    out_ih = sum_j act(s_ij)_h symbols_jh,      s_hij = q_ih . k_jh / sqrt(d) + bias_hij

With `act` softmax the inner products only select; with a pointwise act they are the relations themselves.  Altabaa,
Webb, Cohen and Lafferty 2024, "Abstractors and relational cross-attention".
"""

from typing import Any

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
    check_limits,
    drop,
    products,
    relate,
    retrieve,
    visible,
    with_bias,
)
from polyhead.ops.precision import autocasting
from polyhead.spec import RELATION_ACTS
from polyhead.spec.shapes import one_of, shaped


@shaped
@autocasting
def code(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: float | None = None,
    act: str = "softmax",
) -> Float[Tensor, "b h t s"]:
    """act(s) of all pairs, 0 for those that may not look."""
    check_limits("abstractor_attention", q.shape[0], q.shape[1], k.shape[1], window, cu_seqlens)
    look = visible(mask, causal, q.shape[1], k.shape[1], q.device, window=window, cu_seqlens=cu_seqlens)
    scores = products(q, k, scale)
    biased, look = with_bias(scores, bias, look)
    a = relate(biased.to(scores.dtype), act, look)
    return a if look is None else a.masked_fill(~look, 0)


def reference(
    q: Tensor,
    k: Tensor,
    symbols: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    act: str = "softmax",
) -> Tensor:
    """The equation, as it stands."""
    seen: dict[str, Any] = {"mask": mask, "causal": causal, "window": window, "cu_seqlens": cu_seqlens}
    return retrieve(drop(code(q, k, bias=bias, **seen, scale=scale, act=act), keep), symbols)


@shaped
@autocasting
def abstractor_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
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
    act: str = "softmax",
) -> Float[Tensor, "b t h e"]:
    """Relational cross-attention, `out_h = sum_s act(q k^T / sqrt(d))_h symbols_h`.

    symbols: values by key, or by offset (row j - i + t - 1 is the symbol of key j for query i); act:
    spec.RELATION_ACTS, of the scores with their bias; nothing is normalised unless it is softmax. A masked pair
    counts 0, a query that may look nowhere gets exactly 0. `window`: only keys less than so many places away, the
    last query aligned with the last key; `cu_seqlens`: the one sample is several sequences, which do not see one
    another. ValueError if an explicit impl cannot take the inputs. Altabaa et al. 2024.

    >>> abstractor_attention(q, k, symbols, causal=True, act="sigmoid")      # (b t h e)
    """
    one_of("abstractor_attention", "act", act, RELATION_ACTS)
    limits: dict[str, Any] = {
        "bias": bias,
        "mask": mask,
        "causal": causal,
        "window": window,
        "cu_seqlens": cu_seqlens,
        "keep": keep,
        "scale": scale,
    }
    k, symbols = blank(mask, k, symbols)
    return choose("abstractor", impl, Inputs(q, k, symbols, **limits, act=act))(q, k, symbols, **limits, act=act)


load("abstractor")
