"""Linear attention: the scores are used as they are, so the sum over keys can be carried along as a state.

    out_ih = sum_j a_hij act(v_jh),      a_hij = q_ih . k_jh / sqrt(d) + bias_hij             parallel
    out_i  = S_i q_i / sqrt(d),          S_i = S_(i-1) + act(v_i) k_i^T                       recurrent (causal, t = s)

Schug et al. 2024, "Attention as a hypernetwork", eq. 3 without the softmax; `normalise="rms_heads"` and an `act`
other than identity are the ablations of its table A1.  Recurrent form: Katharopoulos et al. 2020, eq. 16 to 20 (no
feature map here).
"""

from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.code import Bias, Inputs, Keep, Mask, Packed, drop, latent_code, share, visible, wide
from polyhead.ops.code import act as activation
from polyhead.ops.dispatch import choose, load
from polyhead.ops.tiles import look_at_keys, refuse, stateless
from polyhead.shapes import shaped


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    normalise: str = "identity",
    act: str = "identity",
) -> Tensor:
    """The parallel equation, as it stands."""
    look = visible(mask, causal, q.shape[1], k.shape[1], q.device, window=window, cu_seqlens=cu_seqlens)
    code = latent_code(q, k, normalise=normalise, bias=bias, mask=look, scale=scale)
    return einsum(drop(code, keep), activation(act)(share(v, q.shape[2])), "b h t s, b s h e -> b t h e")


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    normalise: str = "identity",
    act: str = "identity",
) -> Tensor:
    """The recurrent equation: keys enter the state one by one, each query reads the state of all keys it may see."""
    refuse(
        "linear_attention",
        "recurrent",
        stateless(Inputs(q, k, v, bias, mask, keep, causal, window, cu_seqlens, normalise)),
    )
    t, h, s = q.shape[1], q.shape[2], k.shape[1]
    k, v = wide(share(look_at_keys(k, mask), h)), wide(activation(act)(share(v, h)))
    states = [k.new_zeros(q.shape[0], h, q.shape[-1], v.shape[-1])]
    for j in range(s):
        states.append(states[-1] + einsum(k[:, j], v[:, j], "b h d, b h e -> b h d e"))
    seen = torch.stack([states[max(0, i + 1 + s - t) if causal else s] for i in range(t)], dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return einsum(wide(q) * scale, seen, "b t h d, b t h d e -> b t h e").to(q.dtype)


@shaped
def linear_attention(
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
    normalise: str = "identity",
    act: str = "identity",
) -> Float[Tensor, "b t h e"]:
    """Linear attention, `out = (q k^T / sqrt(d) + bias) act(v)` per head: no feature map, no division.

    normalise: how scores become the code (spec.NORMALISE); act: acts on the values (spec.ACTS). O(t) time and
    memory when nothing but a mask of keys touches the scores. A query that may look nowhere gets exactly 0.
    `window`: only keys less than so many places away, the last query aligned with the last key; `cu_seqlens`: the
    one sample is several sequences, which do not see one another. ValueError if an explicit impl cannot take the
    inputs. Schug et al., eq. 3 without the softmax.

    >>> linear_attention(q, k, v, causal=True)      # (b t h e)
    """
    limits: dict[str, Any] = {
        "bias": bias,
        "mask": mask,
        "causal": causal,
        "window": window,
        "cu_seqlens": cu_seqlens,
        "keep": keep,
    }
    run = choose("linear", impl, Inputs(q, k, v, **limits, normalise=normalise))
    return run(q, k, v, **limits, scale=scale, normalise=normalise, act=act)


load("linear")
