"""Linear attention in O(t) time and memory: a chunk of queries reads the state of earlier chunks and its own keys.

    full     out_i = S q_i,                                              S   = sum over all keys of act(v_j) k_j^T
    causal   out_i = S_n q_i + sum_(own j <= i) (q_i . k_j) act(v_j),    S_n = the same sum over the chunks before n

Packed sequences: at most one sequence crosses the border between two chunks, so one state per border is enough.  The
state starts at 0 when another sequence crosses.  Differences of sums over the whole sample would be inexact for a short
sequence after a long one.  Without causality a second state sums the later chunks.

All chunks go through one batched product; only the states of packed sequences are summed in a loop over chunks.
Yang et al. 2024, "Gated linear attention", sec. 2.
"""

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from polyhead.ops.call import AttentionCall, sequence_of
from polyhead.ops.kernel import batching_rule, check_backward, unsupported_by_kernels
from polyhead.ops.latent_code import act as activation, wide, zero_hidden_keys
from polyhead.ops.tiles import unsupported_mask

CHUNK = 64
"""Queries per chunk."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the keys cannot be summed into a state that is independent of the query, or None if they can.

    For packed sequences a custom op sums the states.
    """
    if call.normalise != "identity":
        return f"takes normalise='identity' only, not {call.normalise!r}"
    for name in ("bias", "keep", "window"):
        if getattr(call, name) is not None:
            return f"takes no {name}"
    reason = unsupported_mask(call)
    if reason is None and call.cu_seqlens is not None:
        return unsupported_by_kernels(call)
    return reason


def preferred(call: AttentionCall) -> bool:
    """Whether chunks were measured to be no slower than the reference: in causal attention from some length on."""
    t, d = call.q.shape[1], call.q.shape[-1]
    return not call.causal or t == 1 or t >= max(128, 4 * d)


def forward(call: AttentionCall) -> Tensor:
    """Linear attention in chunks; grouped heads read the state of their group."""
    t, s = call.lengths
    q, k, v = call.q * call.score_scale, zero_hidden_keys(call.mask, call.k), activation(call.act)(call.v)
    if call.cu_seqlens is not None:
        return _packed(q, k, v, call.cu_seqlens, causal=call.causal)
    if not call.causal or t == 1:
        return _full(q, _state(k, v))
    if s >= t:
        return _square(q, k[:, s - t :], v[:, s - t :], _state(k[:, : s - t], v[:, : s - t]))[0]
    # The first t - s queries see no key.
    return F.pad(_square(q[:, t - s :], k, v, _state(k[:, :0], v[:, :0]))[0], (0, 0, 0, 0, t - s, 0))


def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention of t new tokens: their outputs and the state (b g d e) after them, given the state before."""
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if q.shape[1] == 1:  # chunks of one row take 3.5 times as long
        after = _state(k, v) if state is None else state + _state(k, v)
        return _full(q, after), after
    return _square(q, k, v, _state(k[:, :0], v[:, :0]) if state is None else state)


def _state(k: Tensor, v: Tensor) -> Tensor:
    return einsum(wide(k), wide(v), "b s g d, b s g e -> b g d e")


def _read(q: Tensor, states: Tensor) -> Tensor:
    """q @ states in the dtype of the states, as these may overflow half precision; the result returns to that of q."""
    return (wide(q) @ states).to(q.dtype)


def _full(q: Tensor, state: Tensor) -> Tensor:
    """Every query's product with one state."""
    groups = q.unflatten(2, (state.shape[1], -1)).permute(0, 2, 3, 1, 4)  # (b g r t d)
    out = _read(groups.flatten(2, 3), state).unflatten(2, groups.shape[2:4])
    return rearrange(out, "b g r t e -> b t (g r) e")


def _chunks(x: Tensor, chunk: int, groups: int) -> Tensor:
    """(b t h d) as (b g n (h/g t) d): n chunks of t rows, padded with zeros."""
    # Not F.pad: when it pads nothing, its gradient has other strides than torch.compile expects.
    x = torch.cat((x, x.new_zeros(x.shape[0], -x.shape[1] % chunk, *x.shape[2:])), 1)
    return rearrange(x, "b (n t) (g r) d -> b g n r t d", t=chunk, g=groups).flatten(3, 4).contiguous()


def _rows(x: Tensor, chunk: int, t: int) -> Tensor:
    """The inverse of `_chunks`."""
    return rearrange(x.unflatten(3, (-1, chunk)), "b g n r t e -> b (n t) (g r) e")[:, :t]


def _own(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """The part of the output from keys of the query's own chunk; the mask `visible` is (t s) or (n t s)."""
    chunk = visible.shape[-1]
    visible = visible.unsqueeze(-3)  # all heads of a group
    return (q @ k.mT).unflatten(3, (-1, chunk)).masked_fill(~visible, 0).flatten(3, 4) @ v


def _square(q: Tensor, k: Tensor, v: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention with as many queries as keys: the output and the last state.

    `before` is the state of earlier keys, which all queries attend to.
    """
    t, g = q.shape[1], k.shape[2]
    chunk = max(1, min(CHUNK, t))
    q, k, v = (_chunks(x, chunk, g) for x in (q, k, v))
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # State n holds all keys before chunk n: a running sum of the products of each chunk.
    states = torch.cat((before.unsqueeze(2), wide(k).mT @ wide(v)), 2).cumsum(2)
    out = _own(q, k, v, lower) + _read(q, states[:, :, :-1])
    return _rows(out, chunk, t), states[:, :, -1]


# ----------------------------------------------------------------------------------------------------- packed sequences
def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool) -> Tensor:
    t, g = q.shape[1], k.shape[2]
    chunk = max(1, min(CHUNK, t))
    r = q.shape[2] // g
    q, k, v = (_chunks(x, chunk, g) for x in (q, k, v))
    number = sequence_of(cu_seqlens, q.shape[2] * chunk).unflatten(0, (-1, chunk))
    visible = number[:, :, None] == number[:, None]
    out = _own(q, k, v, visible.tril() if causal else visible)
    out = out + _entering(q, _before(k, v, number), (number == number[:, :1]).repeat(1, r))
    # Not causal: what comes after is what comes before, read backwards.
    if not causal:
        after = _before(k.flip(2, 3), v.flip(2, 3), number.flip(0, 1)).flip(2)
        out = out + _entering(q, after, (number == number[:, -1:]).repeat(1, r))
    return _rows(out, chunk, t)


def _entering(q: Tensor, states: Tensor, reads: Tensor) -> Tensor:
    """The part of the output from earlier chunks, for the queries in `reads`: those of the sequence that enters."""
    return _read(q.masked_fill(~reads.unsqueeze(-1), 0), states)


def _before(k: Tensor, v: Tensor, number: Tensor) -> Tensor:
    """(b g n d e): at the start of each chunk, the state of the sequence of its first row."""
    enters = number[:, 0]
    leaves = torch.cat((enters[1:], enters[-1:]))  # the sequence of the next chunk's first row
    goes_on = number == leaves[:, None]
    steps = wide(k).masked_fill(~goes_on.unsqueeze(-1), 0).mT @ wide(v)
    return torch.ops.polyhead.sums_before(steps, enters == leaves)


@torch.library.custom_op("polyhead::sums_before", mutates_args=())
def _sums_before(steps: Tensor, same: Tensor) -> Tensor:
    """Along dimension 2: out_0 = 0; out_(n+1) = steps_n + out_n where same_n, otherwise steps_n."""
    out = torch.zeros_like(steps)
    for n, continues in enumerate(same[:-1]):
        torch.add(torch.where(continues, out[:, :, n], 0), steps[:, :, n], out=out[:, :, n + 1])
    return out


@_sums_before.register_fake
def _(steps, same):  # type: ignore[no-untyped-def]
    return torch.empty_like(steps)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[1])


def _grad(ctx, dout):  # type: ignore[no-untyped-def]
    """The gradient: the same sums in reverse order."""
    check_backward("linear_attention", "chunked")
    (same,) = ctx.saved_tensors
    return torch.ops.polyhead.sums_before(dout.flip(2), same.flip(0)).flip(2), None


_sums_before.register_autograd(_grad, setup_context=_setup)
_sums_before.register_vmap(batching_rule(_sums_before))
