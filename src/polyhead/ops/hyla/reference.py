"""HYLA, hypernetwork linear attention: the code of a pair over heads configures a small value network for that pair.

    z_ij   = act(sum_h a_hij v_jh)                      the pair's hidden layer
    out_ih = sum_j a_hij z_ij                           its output layer; W_out_h follows in the layer
    z_ij   = act(sum_h a_hij W_h act(sum_h a_hij v_jh)) with a deep value network

with a_hij the rms over heads of the scores.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6; eq. 10 (deep).
"""

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Packed
from polyhead.ops.dispatch import compute, load
from polyhead.ops.latent_code import act as activation, code, drop, share
from polyhead.ops.precision import autocasting
from polyhead.spec.shapes import shaped


def reference(x: AttentionCall) -> Tensor:
    """Equation 6 (or 10), literally."""
    phi, a = activation(x.act), drop(code(x), x.keep)
    # Contiguous: with mixed layouts the gradient of act takes 40 times as long as this copy.
    z = phi(einsum(a, share(x.v, x.q.shape[2]), "b h t s, b s h e -> b t s e").contiguous())
    if x.value_weight is not None:
        # Two operands at a time: for three, PyTorch chooses an order by the sizes, which an export then has fixed.
        layers = einsum(x.value_weight, z, "h f e, b t s e -> b t s h f")
        z = phi(einsum(a, layers, "b h t s, b t s h f -> b t s f"))
    return einsum(a, z, "b h t s, b t s e -> b t h e")


@shaped
@autocasting
def hyla(
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
    normalise: str = "rms_heads",
    act: str = "relu",
    value_weight: Float[Tensor, "h e e"] | None = None,
) -> Float[Tensor, "b t h e"]:
    """HYLA, `out_h = sum_s a_h act(sum_h a_h v_h)`: the code of a pair configures the value network of the pair.

    normalise: how scores become the code (spec.NORMALISE); act: activation in the value network (spec.ACTS);
    value_weight: [head, out, in], one more layer, `act(sum_h a_h W_h z)`. `keep` multiplies the code at every use. A
    query without a visible key gets exactly 0. `window`: only keys less than `window` positions away; the last query is
    aligned with the last key. `cu_seqlens`: the single sample is several packed sequences, masked from one another.
    Raises ValueError if an explicit impl cannot take the inputs. Schug et al., eq. 6; eq. 10 with value_weight.

    >>> hyla(q, k, v, causal=True)      # (b t h e)
    """
    x = AttentionCall(
        q, k, v, bias, mask, keep, causal, window, cu_seqlens, scale=scale,
        normalise=normalise, act=act, value_weight=value_weight,
    )  # fmt: skip
    return compute("hyla", impl, x)


load("hyla")
