"""Softmax attention: every head mixes values with weights that sum to one over the keys.

    out_ih = sum_j a_hij v_jh,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)

Vaswani et al. 2017, "Attention is all you need", eq. 1.
"""

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Packed
from polyhead.ops.dispatch import compute, load
from polyhead.ops.latent_code import code, drop, share
from polyhead.ops.precision import autocasting
from polyhead.spec.shapes import shaped


def reference(x: AttentionCall) -> Tensor:
    """The equation, literally."""
    return einsum(drop(code(x), x.keep), share(x.v, x.q.shape[2]), "b h t s, b s h e -> b t h e")


@shaped
@autocasting
def softmax_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: float | None = None,
    keep: Keep | None = None,
    impl: str = "auto",
) -> Float[Tensor, "b t h e"]:
    """Softmax attention, `out = softmax(q k^T / sqrt(d) + bias) v` per head.

    Query head i reads group i // (h / g) of keys and values. A query without a visible key gets exactly 0.
    `window`: only keys less than `window` positions away; the last query is aligned with the last key. `cu_seqlens`:
    the single sample is several packed sequences, masked from one another. Raises ValueError if an explicit impl cannot
    take the inputs. Vaswani et al. 2017, eq. 1.

    >>> softmax_attention(q, k, v, causal=True)      # (b t h e)
    """
    x = AttentionCall(q, k, v, bias, mask, keep, causal, window, cu_seqlens, scale=scale)
    return compute("softmax", impl, x)


load("softmax")
