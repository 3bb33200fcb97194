"""Pooled heads; polyhead/ops/pooled/op.py has the equations."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Keep, Mask, Masks, Packed, Scale
from polyhead.jaxside.dispatch import compute
from polyhead.jaxside.latent_code import ACTIVATIONS, any_head, code, drop, finite_bias, rms_heads, share, wide
from polyhead.spec.shapes import check_reads_all_queries, shaped


def reference(call: AttentionCall) -> jax.Array:
    """The equation of `call.network`, literally."""
    mask = finite_bias(call)[1]
    a = drop(code(call), call.keep)
    if call.network == "sequence":
        return sequence_network(call, a, mask)
    phi = ACTIVATIONS[call.act]
    # The mixtures of values (b 1 t s e), which all heads share, and the codes (b h t s 1).
    u = jnp.einsum("b h t s, b s h e -> b t s e", a, share(call.v, call.q.shape[2]))[:, None]
    a = a[..., None]
    if call.network == "pair":
        out = pooled(a * phi(u), call.pool, mask)
    else:
        # The code of a query (b h t 1 1) is what pooling leaves of the codes of its pairs.
        query_code = rms_heads(wide(pooled(a, call.pool, mask))).astype(a.dtype)
        out = query_code * phi(pooled(u, call.pool, any_head(mask)))
    return out[:, :, :, 0].swapaxes(1, 2)


def sequence_network(call: AttentionCall, a: jax.Array, mask: jax.Array | None) -> jax.Array:
    """(b t h e): one code chooses a mixture of the heads' operations for all queries, given the pairs' codes `a`."""
    # The code of the sequence (b h 1 1 1): the mean over the queries that see a key.
    query_code = wide(pooled(a[..., None], call.pool, mask))
    num_queries: int | jax.Array = max(a.shape[2], 1)
    if mask is not None:
        sees_key = jnp.broadcast_to(mask, a.shape).any(3)
        num_queries = jnp.maximum(sees_key.sum(2), 1)[..., None, None, None]
    total = query_code.sum(2, keepdims=True)
    sequence_code = rms_heads((total / num_queries).astype(total.dtype)).astype(a.dtype)

    # The first layer mixes the heads' operations, and the code is the second layer, too.
    v = share(call.v, call.q.shape[2])
    mixed = jnp.einsum("b h t s, b s h e -> b t s e", a * sequence_code[..., 0], v)
    hidden = ACTIVATIONS[call.act](pooled(mixed[:, None], call.pool, any_head(mask)))
    return (sequence_code * hidden)[:, :, :, 0].swapaxes(1, 2)


def pooled(x: jax.Array, pool: str, mask: jax.Array | None) -> jax.Array:
    """(b h t s e), 0 at invisible keys, as (b h t 1 e): pooled over the visible keys, 0 without any."""
    if pool == "sum":
        return x.sum(3, keepdims=True)
    if mask is None:
        mask = jnp.ones(x.shape[2:4], bool)
    is_visible = jnp.broadcast_to(mask, jnp.broadcast_shapes(mask.shape, x.shape[2:4]))[..., None]
    if pool == "max":
        if not x.shape[3]:
            return x.sum(3, keepdims=True)
        return jnp.where(is_visible.any(-2, keepdims=True), largest(jnp.where(is_visible, x, -jnp.inf)), 0)
    total = wide(x).sum(3, keepdims=True)  # may be more than float16 holds
    count = jnp.maximum(is_visible.sum(-2, keepdims=True), 1).astype(total.dtype)
    return (total / count).astype(x.dtype)


@jax.custom_jvp
def largest(x: jax.Array) -> jax.Array:
    """(b h t s e) -> (b h t 1 e), the maximum over keys.  Keys that are equal share its gradient, as in PyTorch."""
    return x.max(3, keepdims=True)


@largest.defjvp
def largest_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The derivative: the mean of the tangents of all keys that have the maximum."""
    (x,), (tangent,) = primals, tangents
    # Under jit, x computed twice may be rounded in two ways and equal its maximum nowhere.  An index cannot miss.
    index = x.argmax(3, keepdims=True)
    value = jnp.take_along_axis(x, index, 3)
    is_largest = (x == value) | (jax.lax.broadcasted_iota(index.dtype, x.shape, 3) == index)
    share = is_largest / is_largest.sum(3, keepdims=True)
    return value, (share.astype(x.dtype) * tangent).sum(3, keepdims=True)


@shaped
def pooled_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g e"],
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: Scale = None,
    keep: Keep | None = None,
    impl: str = "auto",
    normalise: str = "rms_heads",
    act: str = "relu",
    pool: str = "max",
    network: str = "pair",
) -> Float[Array, "b t h e"]:
    """HYLA with another pooling over the visible keys, `out_h = pool_s a_h act(sum_h a_h v_h)`.

    Arguments and errors are those of `polyhead.ops.pooled_attention`.  Static under jit: causal, window, impl,
    normalise, act, pool, network.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    if network == "sequence":
        check_reads_all_queries("pooled_attention", masks, q.shape[1])
    call = AttentionCall(q, k, v, bias, masks, keep, scale, normalise=normalise, act=act, pool=pool, network=network)
    return compute("pooled_attention", reference, impl, call)
