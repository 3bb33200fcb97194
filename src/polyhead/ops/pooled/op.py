"""Pooled heads: HYLA with another pooling of the keys, or with one value network for each query or each sequence.

    out_ih = pool_j a_hij act(u_ij),                  u_ij = sum_h a_hij v_jh          network "pair"
    out_ih = c_ih act(pool_j u_ij),                   c_ih = rms_h(pool_j a_hij)       network "query"
    out_ih = c_h act(pool_j sum_h c_h a_hij v_jh),    c_h = rms_h(mean_i pool_j a_hij)         network "sequence"

with a_hij the rms over heads of the scores, and pool_j the max, the mean or the sum over the keys that query i may
attend to; mean_i is over the queries that see a key.  Schug et al. 2024, "Attention as a hypernetwork", section 7
proposes other poolings, query-specific value networks and a hypernetwork of the full sequence operation in words; the
equations are ours.  "pair" with the sum is HYLA, eq. 6.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Masks, Packed
from polyhead.ops.dispatch import Op, run
from polyhead.ops.latent_code import (
    act as activation,
    any_head,
    at_least_float32,
    code,
    drop,
    rms_heads,
    share,
    visible_pairs,
    wide,
)
from polyhead.ops.tiling import tiled
from polyhead.spec import mechanism
from polyhead.spec.shapes import check_reads_all_queries, shaped


def reference(call: AttentionCall) -> Tensor:
    """The equation of `call.network`, literally."""
    visible, a = visible_pairs(call), drop(code(call), call.keep)
    if call.network == "sequence":
        return sequence_network(call, a, visible)
    phi = activation(call.act)
    # The mixtures of values (b 1 t s e), which all heads share, and the codes (b h t s 1).
    u = torch.einsum("b h t s, b s h e -> b t s e", a, share(call.v, call.q.shape[2]))[:, None]
    a = a[..., None]
    if call.network == "pair":
        out = pooled(a * phi(u), call.pool, visible)
    else:
        # The code of a query (b h t 1 1) is what pooling leaves of the codes of its pairs.
        query_code = rms_heads(wide(pooled(a, call.pool, visible))).to(a.dtype)
        out = query_code * phi(pooled(u, call.pool, any_head(visible)))
    return out.squeeze(3).transpose(1, 2)


def sequence_network(call: AttentionCall, a: Tensor, visible: Tensor | None) -> Tensor:
    """(b t h e): one code chooses a mixture of the heads' operations for all queries, given the pairs' codes `a`."""
    # The code of the sequence (b h 1 1 1): the mean over the queries that see a key.
    query_code = wide(pooled(a[..., None], call.pool, visible))
    num_queries: int | Tensor = max(a.shape[2], 1)
    if visible is not None:
        sees_key = visible.expand(a.shape).any(3)
        num_queries = sees_key.sum(2).clamp(min=1)[..., None, None, None]
    sequence_code = rms_heads(query_code.sum(2, keepdim=True) / num_queries).to(a.dtype)

    # The first layer mixes the heads' operations, and the code is the second layer, too.
    v = share(call.v, call.q.shape[2])
    mixed = torch.einsum("b h t s, b s h e -> b t s e", a * sequence_code[..., 0], v)
    hidden = activation(call.act)(pooled(mixed[:, None], call.pool, any_head(visible)))
    return (sequence_code * hidden).squeeze(3).transpose(1, 2)


def pooled(x: Tensor, pool: str, visible: Tensor | None) -> Tensor:
    """(b h t s e), 0 at invisible keys, as (b h t 1 e): pooled over the visible keys, 0 without any."""
    if pool == "sum" or x.shape[3] == 0:
        return x.sum(3, keepdim=True)
    if visible is None:
        return x.amax(3, keepdim=True) if pool == "max" else x.mean(3, keepdim=True)
    visible = visible.expand(torch.broadcast_shapes(visible.shape, x.shape[2:4]))[..., None]
    # A code of 0 at a hidden key would win over negative ones, so hidden keys are -inf here.
    if pool == "max":
        highest = x.masked_fill(~visible, -torch.inf).amax(3, keepdim=True)
        return highest.masked_fill(~visible.any(-2, keepdim=True), 0)
    total = x.sum(3, keepdim=True, dtype=at_least_float32(x.dtype))  # may be more than float16 holds
    return (total / visible.sum(-2, keepdim=True).clamp(min=1)).to(x.dtype)


POOLED = Op(
    row=mechanism("pooled_attention"), reference=reference, backends={"blocked": tiled("pooled_attention", reference)}
)


@shaped
def pooled_attention(
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
    pool: str = "max",
    network: str = "pair",
) -> Float[Tensor, "b t h e"]:
    """HYLA with another pooling over the visible keys, `out_h = pool_s a_h act(sum_h a_h v_h)`.

    With network "query" each query has its own: `out_h = c_h act(pool_s sum_h a_h v_h)`, with c the rms over heads of
    `pool_s a_h`.  With "sequence" all queries have one: `out_h = c_h act(pool_s sum_h c_h a_h v_h)`, with c the rms
    over heads of the mean over queries of `pool_s a_h`.  A query without a visible key gets exactly 0.  Schug et al.,
    section 7, in words.  Other arguments and errors are those of `softmax_attention`.

    >>> pooled_attention(q, k, v, causal=True)      # (b t h e)

    Args:
        keep: Multiplies the code at every use; a dropped pair is still pooled.
        normalise: How scores become the code: a name of `spec.NORMALISE`.
        act: Activation in the value network: a name of `spec.ACTS`.
        pool: "max", "mean" or "sum" over the visible keys (`spec.POOLS`).
        network: What has a value network: each "pair", each "query" or the "sequence".

    Raises:
        ValueError: For "sequence", which reads all queries, with causal, window, cu_seqlens or a mask of keys alone.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    if network == "sequence":
        check_reads_all_queries("pooled_attention", masks, q.shape[1])
    call = AttentionCall(
        q, k, v, bias, masks, keep, scale, impl, normalise=normalise, act=act, pool=pool, network=network
    )
    return run(POOLED, call)
