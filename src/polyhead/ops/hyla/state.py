"""HYLA without its nonlinearity and without RMSHead, in O(t): second-order attention whose keys sum to a state.

    out_ih = sum_j a_hij sum_h' a_h'ij v_jh',   a_hij = q_ih . k_jh / sqrt(d)
           = sum_(c h' c') q_ihc q_ih'c' S_(h'c', hc),     S = sum_j k_jh'c' v_jh' k_jhc

In causal attention a chunk of queries reads the state of all earlier chunks and its own pairs.  A state has (h d)^2 e
numbers, and a token costs about 4 (h d)^2 e multiplications for any t.  Pair by pair a token costs 3 h e t / 2, so the
state pays for narrow heads and long sequences: above about t = 4/3 h d^2.  Schug et al. 2024, "Attention as a
hypernetwork", table A1 (the ablation); the state is ours.
"""

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import check_step, wide, zero_hidden_keys
from polyhead.ops.precision import casting
from polyhead.ops.tiles import unsupported_by_states
from polyhead.spec.shapes import shaped

SMALL, LARGE = 16, 128
"""The smallest and largest chunk, in queries.  Between them it is g d, where its pairs cost as much as its state."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why there is no state to carry, or None."""
    reason = unsupported_by_states(call)
    if reason is not None:
        return reason
    if call.act != "identity":
        return f"takes act='identity' only, not {call.act!r}"
    if call.value_weight is not None:
        return "takes no value_weight"
    return None if call.cu_seqlens is None else "takes no cu_seqlens"


def preferred(call: AttentionCall) -> bool:
    """Whether a state was measured to be no slower than the reference and tiles.

    It gains with long sequences and narrow heads, above about t = (g d)^2 / 4 h in causal attention.  Wider states
    would take too much memory.  Nothing was measured on a GPU, where kernels go first.
    """
    t = min(call.q.shape[1], call.k.shape[1])
    h, (g, d) = call.q.shape[2], call.k.shape[2:]
    tokens_per_pair = (g * d) ** 2 // h  # the cost of one token of a state over that of one pair, in proportion
    min_length = max(128, tokens_per_pair // 4) if call.causal else max(32, tokens_per_pair // 6)
    return not call.q.is_cuda and g * d <= LARGE and t >= min_length


def forward(call: AttentionCall) -> Tensor:
    """HYLA by a state; heads of a group share the part of their keys."""
    (t, s), dtype = call.lengths, call.q.dtype
    q, k, v = wide(call.q) * call.score_scale, zero_hidden_keys(call.mask, wide(call.k)), wide(call.v)
    if not call.causal or t == 1:
        out = _read(rearrange(q, "b t (g r) d -> b 1 t g r d", g=k.shape[2]), _states(k[:, None], v[:, None]))
        return rearrange(out, "b 1 t g r e -> b t (g r) e").to(dtype)
    if s >= t:
        before = _states(k[:, None, : s - t], v[:, None, : s - t])
        return _causal(q, k[:, s - t :], v[:, s - t :], before)[0].to(dtype)
    # The first t - s queries see no key.
    return F.pad(_causal(q[:, t - s :], k, v, _nothing(k, v))[0], (0, 0, 0, 0, t - s, 0)).to(dtype)


@shaped
def hyla_step(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    state: Float[Tensor, "b g d e g d"] | None = None,
    *,
    scale: float | None = None,
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e g d"]]:
    """Causal HYLA of t new tokens, given the state of all earlier tokens: outputs and the next state.

    normalise and act are the identity.  The state is in at least float32; None means that there are no earlier tokens.
    Raises ValueError for dtypes that do not match.

    >>> torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)      # b = 1, t = 5, h = 2, d = 4
    >>> out, state = hyla_step(q[:, :3], k[:, :3], v[:, :3])
    >>> last, state = hyla_step(q[:, 3:], k[:, 3:], v[:, 3:], state)
    >>> wanted = forward(AttentionCall(q, k, v, causal=True, normalise="identity"))
    >>> torch.allclose(torch.cat((out, last), 1), wanted)
    True
    """
    with casting(q, k, v) as (q, k, v):
        check_step("hyla_step", q, k, v, state)
        g, d, e = *k.shape[2:], v.shape[-1]
        before = _nothing(k, v) if state is None else rearrange(state, "b f c e g d -> b 1 (f c) (e g d)")
        scaled = wide(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
        out, after = _causal(scaled, wide(k), wide(v), before)
        return out.to(q.dtype), rearrange(after, "b 1 (f c) (e g d) -> b f c e g d", f=g, c=d, e=e, g=g)


def _states(k: Tensor, v: Tensor) -> Tensor:
    """(b n g*d e*g*d): for each chunk (b n s g _) the sum_j k_jfc v_jfe k_jgd; f is the group of the value."""
    values = einsum(k, v, "b n s f c, b n s f e -> b n s f c e").flatten(3)
    return (values.mT @ k.flatten(3)).unflatten(2, (k.shape[3] * k.shape[4], -1)).flatten(3)


def _nothing(k: Tensor, v: Tensor) -> Tensor:
    """The state before the first key."""
    return _states(wide(k)[:, None, :0], wide(v)[:, None, :0])


def _read(q: Tensor, states: Tensor) -> Tensor:
    """The products of queries (b n t g r d) with the states of their chunks: (b n t g r e)."""
    g, d = q.shape[3], q.shape[5]
    networks = (q.sum(4).flatten(3) @ states).unflatten(3, (-1, g, d))
    return einsum(networks, q, "b n t e g d, b n t g r d -> b n t g r e")


def _causal(q: Tensor, k: Tensor, v: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Causal HYLA with as many queries as keys: the output and the last state.

    `before` (b 1 g*d e*g*d) is the state of earlier keys, which all queries attend to.
    """
    t, (g, d) = q.shape[1], k.shape[2:]
    chunk = max(1, min(t, LARGE, max(SMALL, g * d)))
    # Not F.pad: when it pads nothing, its gradient has other strides than torch.compile expects.
    q, k, v = (torch.cat((x, x.new_zeros(x.shape[0], -t % chunk, *x.shape[2:])), 1) for x in (q, k, v))
    q, k, v = (x.unflatten(1, (-1, chunk)) for x in (q.unflatten(2, (g, -1)), k, v))
    # As in linear/chunked.py, with a state of second order.
    states = torch.cat((before, _states(k, v)), 1).cumsum(1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    code = einsum(q, k, "b n t g r d, b n s g d -> b n g r t s").masked_fill(~lower, 0)
    z = einsum(code.sum(3), v, "b n g t s, b n s g e -> b n t s e")
    out = einsum(code, z, "b n g r t s, b n t s e -> b n t g r e") + _read(q, states[:, :-1])
    return out.flatten(1, 2).flatten(2, 3)[:, :t], states[:, -1:]
