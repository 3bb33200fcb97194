"""Linear attention: the scores are not normalised, so the sum over keys can be carried along as a state.

    out_ih = sum_j a_hij act(v_jh),      a_hij = q_ih . k_jh / sqrt(d) + bias_hij             parallel
    out_i  = S_i q_i / sqrt(d),          S_i = S_(i-1) + act(v_i) k_i^T                       recurrent (causal, t = s)

Schug et al. 2024, "Attention as a hypernetwork", eq. 3 without the softmax; `normalise="rms_heads"` and an `act`
other than identity are the ablations of its table A1.  Recurrent form: Katharopoulos et al. 2020, eq. 16 to 20 (no
feature map here).
"""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Packed
from polyhead.ops.dispatch import compute, load
from polyhead.ops.latent_code import act as activation, blank, check_step, code, drop, emptied, sequence_of, share, wide
from polyhead.ops.linear.chunked import step
from polyhead.ops.precision import autocasting
from polyhead.ops.tiles import is_key_mask, refuse, stateless
from polyhead.spec import ACTS
from polyhead.spec.shapes import one_of, shaped


def reference(x: AttentionCall) -> Tensor:
    """The parallel equation, literally."""
    v = activation(x.act)(share(x.v, x.q.shape[2]))
    return einsum(drop(code(x), x.keep), v, "b h t s, b s h e -> b t h e")


def recurrent(x: AttentionCall) -> Tensor:
    """The recurrent equation: keys enter the state one by one; each query reads the state of all its visible keys."""
    refuse("linear_attention", "recurrent", stateless(x))
    q, h, (t, s) = x.q, x.q.shape[2], x.lengths
    k, v = wide(share(emptied(x.mask, x.k), h)), wide(activation(x.act)(share(x.v, h)))
    sequence = None if x.cu_seqlens is None else sequence_of(x.cu_seqlens, s)
    states = [einsum(k[:, :0], v[:, :0], "b s h d, b s h e -> b h d e")]  # zeros: the state without keys
    for j in range(s):
        before = states[-1]
        if sequence is not None and j > 0:
            before = torch.where(sequence[j] == sequence[j - 1], before, 0)
        states.append(before + einsum(k[:, j], v[:, j], "b h d, b h e -> b h d e"))
    if x.causal:
        read = torch.arange(1 + s - t, 1 + s, device=q.device).clamp(min=0)
    elif sequence is None:
        read = torch.full((t,), s, device=q.device)
    else:
        read = torch.searchsorted(sequence, sequence, right=True)  # after the last key of the query's own sequence
    return einsum(wide(q) * x.factor, torch.stack(states, 1)[:, read], "b t h d, b t h d e -> b t h e").to(q.dtype)


@shaped
@autocasting
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

    normalise: how scores become the code (spec.NORMALISE); act: activation of the values (spec.ACTS). Time and memory
    are O(t) if the scores have at most a key mask. A query without a visible key gets exactly 0. `window`: only keys
    less than `window` positions away; the last query is aligned with the last key. `cu_seqlens`: the single sample is
    several packed sequences, masked from one another. Raises ValueError if an explicit impl cannot take the inputs.
    Schug et al., eq. 3 without the softmax.

    >>> linear_attention(q, k, v, causal=True)      # (b t h e)
    """
    x = AttentionCall(q, k, v, bias, mask, keep, causal, window, cu_seqlens, scale=scale, normalise=normalise, act=act)
    return compute("linear", impl, x)


@shaped
@autocasting
def linear_step(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    state: Float[Tensor, "b g d e"] | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    act: str = "identity",
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e"]]:
    """Causal linear attention of t new tokens, given the state of all earlier tokens: outputs and the next state.

    `state` None means that there are no earlier tokens.  The cost of a step does not depend on the number of earlier
    tokens.  Steps of any sizes give the same result as one causal call.  The state is in at least float32.  `mask` is a
    mask of the new keys, (b|1, 1, 1, t).  Raises ValueError for any other mask, and for dtypes that do not match.

    >>> torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)      # b = 1, t = 5, h = 2, d = 4
    >>> out, state = linear_step(q[:, :3], k[:, :3], v[:, :3])
    >>> last, state = linear_step(q[:, 3:], k[:, 3:], v[:, 3:], state)
    >>> torch.allclose(torch.cat((out, last), 1), linear_attention(q, k, v, causal=True))
    True
    """
    one_of("linear_step", "act", act, ACTS)
    check_step("linear_step", q, k, v, state)
    if mask is not None and not is_key_mask(mask):
        raise ValueError(f"linear_step: mask must be one of keys (b|1, 1, 1, t) but is {tuple(mask.shape)}")
    k, v = blank(mask, emptied(mask, k), v)
    return step(q, k, activation(act)(v), state, scale)


load("linear")
