"""Linear attention in O(t) time and memory: a chunk of queries reads the state of earlier chunks and its own keys.

    full     out_i = S q_i,                                              S   = sum over all keys of act(v_j) k_j^T
    causal   out_i = S_n q_i + sum_(own j <= i) (q_i . k_j) act(v_j),    S_n = the same sum over the chunks before n

All chunks go through one batched product.  Yang et al. 2024, "Gated linear attention", sec. 2.

Packed sequences: at most one sequence crosses the border between two chunks.  A query reads the states of the chunks
that its sequence comes from, and without causality of those that it goes on to.  Differences of running sums would be
inexact for a short sequence after a long one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.call import AttentionCall, Masks, sequence_of
from polyhead.ops.latent_code import act as activation, is_known_small, of_pairs, wide, zero_hidden_keys
from polyhead.ops.tiles import unsupported_mask

CHUNK = 64
"""Queries per chunk."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the keys cannot be summed into a state that is independent of the query, or None if they can."""
    if call.normalise != "identity":
        return f"takes normalise='identity' only, not {call.normalise!r}"
    for name, limit in (("bias", call.bias), ("keep", call.keep), ("window", call.masks.window)):
        if limit is not None:
            return f"takes no {name}"
    return unsupported_mask(call.masks)


def preferred(call: AttentionCall) -> bool:
    """Whether chunks were measured to be no slower than the reference: in causal attention from some length on."""
    t, d = call.q.shape[1], call.q.shape[-1]
    return not call.masks.is_causal_for(t) or t >= max(128, 4 * d)


def forward(call: AttentionCall) -> Tensor:
    """Linear attention in chunks; grouped heads read the state of their group."""
    (t, s), masks = call.lengths, call.masks
    q = zero_blind_queries(masks, call.q, s, causal=masks.is_causal_for(t)) * call.score_scale
    k, v = zero_hidden_keys(masks.mask, call.k), activation(call.act)(call.v)
    if masks.cu_seqlens is not None:
        return _packed(q, k, v, masks.cu_seqlens, causal=masks.causal)
    if not masks.is_causal_for(t):
        return _full(q, _state(k, v))
    if s >= t:
        return _square(q, k[:, s - t :], v[:, s - t :], _state(k[:, : s - t], v[:, : s - t]))[0]
    # The first t - s queries see no key.
    return F.pad(_square(q[:, t - s :], k, v, _state(k[:, :0], v[:, :0]))[0], (0, 0, 0, 0, t - s, 0))


def zero_blind_queries(masks: Masks, q: Tensor, s: int, *, causal: bool) -> Tensor:
    """Queries (b t h d), 0 where a mask of keys (b|1 1 1 s|1) hides all that a query may see: NaN there stays without
    effect.  Small numbers stay unchanged where data may be read."""
    if masks.mask is None or is_known_small(q):
        return q
    t = q.shape[1]
    is_real = of_pairs(masks.mask)[:, 0, 0].expand(-1, s).long()  # (b|1 s)
    # The number of real keys up to each key, and in all; of packed sequences those of its own.
    earlier = torch.zeros_like(is_real)
    total = is_real.sum(1, keepdim=True)  # (b|1 1)
    if masks.cu_seqlens is not None:
        sequence = sequence_of(masks.cu_seqlens, s).long()
        totals = is_real.new_zeros(len(is_real), len(masks.cu_seqlens) + 1).index_add(1, sequence, is_real)
        earlier = (totals.cumsum(1) - totals)[:, sequence]
        total = totals[:, sequence]
    if causal:  # the last query is aligned with the last key
        num_seen = F.pad(is_real.cumsum(1) - earlier, (max(t - s, 0), 0))[:, max(s - t, 0) :]
    else:
        num_seen = total
    return q.masked_fill((num_seen == 0)[:, :, None, None], 0)


def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention of t new tokens: their outputs and the state (b g d e) after them, given the state before."""
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if q.shape[1] == 1:  # chunks of one row take 3.5 times as long
        after = _state(k, v) if state is None else state + _state(k, v)
        return _full(q, after), after
    return _square(q, k, v, _state(k[:, :0], v[:, :0]) if state is None else state)


def _state(k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("b s g d, b s g e -> b g d e", wide(k), wide(v))


def _read(q: Tensor, states: Tensor) -> Tensor:
    """q @ states in the dtype of the states, as these may overflow half precision; the result returns to that of q."""
    return (wide(q) @ states).to(q.dtype)


def _full(q: Tensor, state: Tensor) -> Tensor:
    """Every query's product with one state."""
    groups = q.unflatten(2, (state.shape[1], -1)).permute(0, 2, 3, 1, 4)  # (b g r t d)
    out = _read(groups.flatten(2, 3), state).unflatten(2, groups.shape[2:4])  # (b g r t e)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)  # (b t h e)


def _chunks(x: Tensor, chunk: int, groups: int) -> Tensor:
    """(b t h d) as (b g n (h/g t) d): n chunks of t rows, padded with zeros."""
    # Not F.pad: when it pads nothing, its gradient has other strides than torch.compile expects.
    x = torch.cat((x, x.new_zeros(x.shape[0], -x.shape[1] % chunk, *x.shape[2:])), 1)
    x = x.unflatten(2, (groups, -1)).unflatten(1, (-1, chunk))  # (b n t g r d)
    return x.permute(0, 3, 1, 4, 2, 5).flatten(3, 4).contiguous()


def _rows(x: Tensor, chunk: int, t: int) -> Tensor:
    """The inverse of `_chunks`."""
    x = x.unflatten(3, (-1, chunk)).permute(0, 2, 4, 1, 3, 5)  # (b n t g r e)
    return x.flatten(1, 2).flatten(2, 3)[:, :t]


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """The part of the output from keys of the query's own chunk; the mask `visible` is (t s) or (n t s)."""
    visible = visible.unsqueeze(-3)  # heads of a group lie one after the other
    code = (q @ k.mT).unflatten(3, (-1, visible.shape[-1])).masked_fill(~visible, 0).flatten(3, 4)
    return code @ v


def _square(q: Tensor, k: Tensor, v: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention with as many queries as keys: the output and the last state.

    `before` is the state of earlier keys, which all queries attend to.
    """
    t, g = q.shape[1], k.shape[2]
    chunk = max(1, min(CHUNK, t))
    q, k, v = _chunks(q, chunk, g), _chunks(k, chunk, g), _chunks(v, chunk, g)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # State n holds all keys before chunk n: a running sum of the products of each chunk.
    states = torch.cat((before.unsqueeze(2), wide(k).mT @ wide(v)), 2).cumsum(2)  # (b g n+1 d e)
    out = _within_chunks(q, k, v, lower) + _read(q, states[:, :, :-1])
    return _rows(out, chunk, t), states[:, :, -1]


# ----------------------------------------------------------------------------------------------------- packed sequences
def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool) -> Tensor:
    """Attention within packed sequences, with as many queries as keys."""
    t, g = q.shape[1], k.shape[2]
    chunk = max(1, min(CHUNK, t))
    q, k, v = _chunks(q, chunk, g), _chunks(k, chunk, g), _chunks(v, chunk, g)
    sequence = sequence_of(cu_seqlens, k.shape[2] * chunk).unflatten(0, (-1, chunk))  # (n t)
    first, last = sequence[:, 0], sequence[:, -1]  # of each chunk (n)
    visible = sequence[:, :, None] == sequence[:, None]  # (n t t)
    out = _within_chunks(q, k, v, visible.tril() if causal else visible)

    # Only the first sequence of a chunk comes from earlier chunks, and only its last one goes on to later chunks.
    in_first, in_last = sequence == first[:, None], sequence == last[:, None]  # (n t)
    reads_earlier = (first[:, None] == last).tril(-1)  # (n m): the last sequence of chunk m is the first of chunk n
    out = out + _from_other_chunks(q, k, v, reads_earlier, in_first, in_last)
    if not causal:
        reads_later = (last[:, None] == first).triu(1)  # (n m)
        out = out + _from_other_chunks(q, k, v, reads_later, in_last, in_first)
    return _rows(out, chunk, t)


def _from_other_chunks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, readers: Tensor, keys: Tensor) -> Tensor:
    """The part of the output from other chunks.

    Args:
        visible: Which chunk reads which (n m).
        readers: The queries that see other chunks (n t).
        keys: The keys that the readers see (m t).
    """
    sums = wide(k).masked_fill(~keys.unsqueeze(-1), 0).mT @ wide(v)  # (b g m d e)
    states = torch.einsum("n m, b g m d e -> b g n d e", visible.to(sums.dtype), sums)
    heads_per_group = q.shape[3] // readers.shape[1]
    readers = readers.repeat(1, heads_per_group).unsqueeze(-1)  # (n (h/g t) 1)
    return _read(q.masked_fill(~readers, 0), states)
