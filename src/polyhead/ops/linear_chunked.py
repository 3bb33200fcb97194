"""Linear attention in O(t) time and memory: a chunk of queries reads the state of all earlier chunks and its scores.

    full     out_i = S q_i,                                              S   = sum over all keys of act(v_j) k_j^T
    causal   out_i = S_n q_i + sum_(own j <= i) (q_i . k_j) act(v_j),    S_n = the same sum over the chunks before n

All chunks go through one batched multiply; there is no loop.  Yang et al. 2024, "Gated linear attention", sec. 2.
"""

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from polyhead.ops.code import Inputs, wide
from polyhead.ops.code import act as activation
from polyhead.ops.tiles import look_at_keys, refuse, stateless

CHUNK = 64
"""Queries per chunk."""


def refusal(inputs: Inputs) -> str | None:
    """Why there is no state to carry, or None."""
    return stateless(inputs)


def worth(inputs: Inputs) -> bool:
    """Is it measured to be no slower than the reference?"""
    return True


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    keep: Tensor | None = None,
    normalise: str = "identity",
    act: str = "identity",
) -> Tensor:
    """Linear attention by chunks; grouped heads read the state of their group."""
    refuse("linear_attention", "chunked", refusal(Inputs(q, k, v, bias, mask, keep, causal, normalise)))
    t, h, s, g = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    q = rearrange(q * (q.shape[-1] ** -0.5 if scale is None else scale), "b t (g r) d -> b t g r d", g=g)
    k, v = look_at_keys(k, mask), activation(act)(v)
    if not causal or t == 1:
        out = einsum(q, _state(k, v).to(q.dtype), "b t g r d, b g d e -> b t g r e")
    elif s >= t:
        past, now = s - t, slice(s - t, None)
        out = _square(q, k[:, now], v[:, now], _state(k[:, :past], v[:, :past]))
    else:
        # The first t - s queries see no key.
        out = F.pad(_square(q[:, t - s :], k, v, None), (0, 0, 0, 0, 0, 0, t - s, 0))
    return rearrange(out, "b t g r e -> b t (g r) e", r=h // g)


def _state(k: Tensor, v: Tensor) -> Tensor:
    return einsum(wide(k), wide(v), "b s g d, b s g e -> b g d e")


def _square(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None) -> Tensor:
    """Causal, as many queries as keys; `before` is the state of keys that all queries see."""
    t = q.shape[1]
    q, k, v = (_chunks(x) for x in (q, k, v))
    lower = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = einsum(q, k, "b n t g r d, b n s g d -> b n g r t s").masked_fill(~lower, 0)
    own = einsum(scores, v, "b n g r t s, b n s g e -> b n t g r e")
    steps = einsum(wide(k), wide(v), "b n s g d, b n s g e -> b n g d e")
    states = steps.cumsum(1) - steps if before is None else steps.cumsum(1) - steps + before[:, None]
    out = own + einsum(q, states.to(q.dtype), "b n t g r d, b n g d e -> b n t g r e")
    return rearrange(out, "b n t g r e -> b (n t) g r e")[:, :t]


def _chunks(x: Tensor) -> Tensor:
    t = x.shape[1]
    chunk = min(CHUNK, t)
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -t % chunk))
    return x.unflatten(1, (-1, chunk))
