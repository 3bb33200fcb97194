"""The op `abstractor_attention`: its signature and its implementations."""

from jaxtyping import Float
from torch import Tensor

from polyhead.ops.abstractor import sdpa
from polyhead.ops.abstractor.reference import code, reference
from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Packed, Symbols
from polyhead.ops.dispatch import Op, run
from polyhead.ops.tiling import tiled
from polyhead.spec import mechanism
from polyhead.spec.shapes import shaped

ABSTRACTOR = Op(
    row=mechanism("abstractor_attention"),
    reference=reference,
    backends={"sdpa": sdpa, "blocked": tiled("abstractor_attention", reference)},
    code=code,
)


@shaped
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

    symbols: values by key, or by offset (row j - i + t - 1 for query i and key j); act: spec.RELATION_ACTS, applied to
    the scores with their bias; only softmax normalises. A masked pair counts 0; a query without a visible key gets
    exactly 0. `window`: only keys less than `window` positions away; the last query is aligned with the last key.
    `cu_seqlens`: the single sample is several packed sequences, masked from one another. Raises ValueError if an
    explicit impl cannot take the inputs. Altabaa et al. 2024.

    >>> abstractor_attention(q, k, symbols, causal=True, act="sigmoid")      # (b t h e)
    """
    normalise = "softmax" if act == "softmax" else "identity"  # it tells tiles whether they need all keys
    call = AttentionCall(
        q, k, symbols, bias, mask, keep, causal, window, cu_seqlens, normalise, act=act, scale=scale, impl=impl
    )
    return run(ABSTRACTOR, call)
