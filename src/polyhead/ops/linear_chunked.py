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
    """Is it measured to be no slower than the reference?

    Forward and backward, CPU seconds of the reference over those of chunks (one core, float32, 8 heads).  Full: 5.4
    at t = 32, d = 2; 1.3 to 3.0 at t = 32 to 256, d = 8 to 64.  Causal: 0.6 to 0.8 at t <= 64 and at t = 128, d = 64;
    1.9 at t = 128, d = 16; 1.4 at t = 256, d = 64; 2.8 at t = 256, d = 8.
    """
    t, d = inputs.q.shape[1], inputs.q.shape[-1]
    return not inputs.causal or t == 1 or t >= max(128, 4 * d)


def forward(
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
    """Linear attention by chunks; grouped heads read the state of their group."""
    refuse(
        "linear_attention", "chunked", refusal(Inputs(q, k, v, bias, mask, keep, causal, window, cu_seqlens, normalise))
    )
    t, s = q.shape[1], k.shape[1]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    k, v = look_at_keys(k, mask), activation(act)(v)
    if not causal or t == 1:
        return _full(q, k, v)
    if s >= t:
        return _square(q, k[:, s - t :], v[:, s - t :], _state(k[:, : s - t], v[:, : s - t]))
    # The first t - s queries see no key.
    return F.pad(_square(q[:, t - s :], k, v, None), (0, 0, 0, 0, t - s, 0))


def _state(k: Tensor, v: Tensor) -> Tensor:
    return einsum(wide(k), wide(v), "b s g d, b s g e -> b g d e")


def _full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = rearrange(q, "b t (g r) d -> b g (r t) d", g=k.shape[2])
    out = groups @ _state(k, v).to(q.dtype)
    return rearrange(out, "b g (r t) e -> b t (g r) e", t=q.shape[1])


def _square(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None) -> Tensor:
    """Causal, as many queries as keys; `before` is the state of keys that all queries see."""
    t, g = q.shape[1], k.shape[2]
    chunk = min(CHUNK, t)
    # Not F.pad: where it adds nothing its gradient has other strides than a compiler expects.
    q, k, v = (torch.cat((x, x.new_zeros(x.shape[0], -t % chunk, *x.shape[2:])), 1) for x in (q, k, v))
    q = rearrange(q, "b (n t) (g r) d -> b g n r t d", t=chunk, g=g)
    r = q.shape[3]
    q = q.flatten(3, 4)
    k, v = (rearrange(x, "b (n s) g d -> b g n s d", s=chunk).contiguous() for x in (k, v))
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT).unflatten(3, (r, chunk)).masked_fill(~lower, 0).flatten(3, 4)
    steps = wide(k).mT @ wide(v)
    states = steps.cumsum(2) - steps
    states = states if before is None else states + before.unsqueeze(2)
    out = scores @ v + q @ states.to(q.dtype)
    return rearrange(out.unflatten(3, (r, chunk)), "b g n r t e -> b (n t) (g r) e")[:, :t]
