"""Scores, the latent code and relations; polyhead/ops/latent_code.py has the equations."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from polyhead.jaxside.call import Array, AttentionCall, Bias, Mask, Masks, Packed, Scale
from polyhead.spec import NORMALISE, RELATION_ACTS, RMS_HEADS_EPS, SOFTMAX_AXIS
from polyhead.spec.shapes import check_heads, check_masks, one_of, shaped

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
"""The pointwise activations by name (spec.ACTS)."""


def wide(x: jax.Array) -> jax.Array:
    """`x` in at least float32, the dtype to take statistics in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def share(x: jax.Array, heads: int) -> jax.Array:
    """Grouped keys or values (b s g d), repeated for h query heads: head i reads group i // (h / g)."""
    groups = x.shape[2]
    if groups == heads:
        return x
    return jnp.repeat(x, heads // groups, axis=2)


def dense(bias: jax.Array, t: int, s: int) -> jax.Array:
    """A bias by offset (h t+s-1), expanded to (h t s); a dense bias is returned unchanged."""
    if bias.ndim != 2:
        return bias
    h, n = bias.shape
    if t == 0:
        return jnp.zeros((h, 0, s), bias.dtype)
    # A single query is the last one: its row is the bias itself.
    if t == 1:
        return bias[:, None]

    # Viewing rows of n numbers as rows of n - 1 shifts each query by one key.
    rows = jnp.broadcast_to(bias[:, None], (h, t, n)).reshape(h, t * n)
    return rows[:, t - 1 : t * n - 1].reshape(h, t, n - 1)[:, :, :s]


def sequence_of(cu_seqlens: jax.Array, rows: int) -> jax.Array:
    """(rows,) index of the sequence of each row of a packed sample; rows behind the last edge form one more
    sequence."""
    return jnp.searchsorted(cu_seqlens[1:], jnp.arange(rows, dtype=cu_seqlens.dtype), side="right")


def visible(call: AttentionCall, queries: jax.Array | None = None) -> jax.Array | None:
    """Where a query may attend to a key: 1 to 4 dimensions that broadcast to (b h t s), or None for everywhere.

    The last query is aligned with the last key.  A `window` allows keys less than `window` positions away.

    Args:
        queries: The indices of neighbouring queries, in place of all.
    """
    t, s = call.lengths
    masks, mask = call.masks, call.masks.mask

    # Computed by JAX: from NumPy they would be constants of t x s numbers in the compiled program.
    if queries is None:
        queries = jnp.arange(t, dtype=jnp.int32)
    elif mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
        mask = jax.lax.dynamic_slice_in_dim(mask, queries[0], len(queries), mask.ndim - 2)
    query_position = (s - t + queries)[:, None]  # (t 1)
    key_position = jnp.arange(s, dtype=jnp.int32)  # (s)
    limits: list[Any] = []
    if masks.causal:
        limits.append(key_position <= query_position)
    if masks.window is not None:
        window = min(masks.window, t + s)  # within int32
        limits.append(jnp.abs(query_position - key_position) < window)
    if masks.cu_seqlens is not None:
        sequence = sequence_of(masks.cu_seqlens, t)
        limits.append(sequence[queries][:, None] == sequence)
    if mask is not None:
        limits.append(mask)
    if not limits:
        return None
    return functools.reduce(jnp.logical_and, limits)


def drop(code: jax.Array, keep: jax.Array | None) -> jax.Array:
    """Apply dropout to the normalised code; bfloat16 would round 1 / (1 - 0.1) by 0.16 %, for all pairs alike."""
    if keep is None:
        return code
    return (wide(code) * wide(keep)).astype(code.dtype)


def by_offset(code: jax.Array) -> jax.Array:
    """(b h t s) codes as (b h t t+s-1): the code of query i and key j in column j - i + t - 1, elsewhere 0."""
    b, h, t, s = code.shape
    # Viewing rows of n numbers as rows of n + 1 shifts each query back by one key.
    rows = jnp.pad(code, ((0, 0), (0, 0), (0, 0), (max(t - 1, 0), 0))).reshape(b, h, t * (t + s - 1))
    return jnp.pad(rows, ((0, 0), (0, 0), (0, t))).reshape(b, h, t, t + s)[..., : t + s - 1]


def retrieve(code: jax.Array, symbols: jax.Array) -> jax.Array:
    """(b t h e): the sum of symbols, by key or by offset, weighted by (b h t s) codes."""
    if symbols.ndim == 4:
        return jnp.einsum("b h t s, b s h e -> b t h e", code, share(symbols, code.shape[1]))
    return jnp.einsum("b h t n, n h e -> b t h e", by_offset(code), share(symbols[None], code.shape[1])[0])


def softmax_visible(scores: jax.Array, mask: jax.Array | None, axis: int) -> jax.Array:
    """Softmax of (... t s) scores over the visible keys, or of (b h t s) scores over heads.

    A row in which nothing is visible gets zeros and no gradient.
    """
    if mask is None:
        return jax.nn.softmax(scores, axis=axis)
    mask = mask.reshape((1,) * (scores.ndim - mask.ndim) + mask.shape)
    # -inf, as a bias may give visible keys the least number; 0 in an empty row, where -inf would give NaN.
    hidden = jnp.where(mask.any(axis, keepdims=True), -jnp.inf, 0)
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, hidden), axis=axis), 0)


def rms_heads(scores: jax.Array) -> jax.Array:
    """s / sqrt(mean over heads of s^2 + eps), for (b h t s) scores; zero where all heads are zero."""
    return scores * jax.lax.rsqrt(jnp.mean(jnp.square(scores), 1, keepdims=True) + RMS_HEADS_EPS)


def zero_hidden_keys(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    """Keys or values (b s g _), 0 at keys that `mask` hides from every query in all heads: NaN there is harmless."""
    if mask is None or x.ndim != 4:
        return x
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return jnp.where(mask.any((1, 2))[:, :, None, None], x, 0)


def finite_bias(call: AttentionCall) -> tuple[jax.Array | None, jax.Array | None]:
    """The dense bias, with 0 in place of -inf, and the mask; -inf in the bias masks the pair."""
    mask = visible(call)
    if call.bias is None:
        return None, mask
    bias = dense(call.bias, *call.lengths)
    is_finite = bias != -jnp.inf
    mask = is_finite if mask is None else mask & is_finite
    return jnp.where(is_finite, bias, 0), mask


def logits(call: AttentionCall) -> tuple[jax.Array, jax.Array | None]:
    """Scores (b h t s) with their bias in at least float32, and the mask."""
    exact = jnp.promote_types(call.q.dtype, jnp.float32)
    k = share(call.k, call.q.shape[2])

    # Not the queries times a factor: in half precision they would be rounded, see ops/latent_code.py.
    scores = jnp.einsum("b t h d, b s h d -> b h t s", call.q, k, preferred_element_type=exact) * call.score_scale
    bias, mask = finite_bias(call)
    if bias is not None:
        scores = scores + bias
    return scores, mask


def code(call: AttentionCall) -> jax.Array:
    """The code (b h t s) of a call, in the dtype of q.  Masked pairs are -inf before a softmax and 0 otherwise."""
    scores, mask = logits(call)
    axis = SOFTMAX_AXIS.get(call.normalise)
    if axis is not None:
        scores = softmax_visible(scores, mask, "bhts".index(axis))
    elif mask is not None:
        scores = jnp.where(mask, scores, 0)
    # After the mask, because a mean over heads must not read hidden scores.
    if call.normalise in ("rms_heads", "softmax_rms_heads"):
        scores = rms_heads(scores)
    return scores.astype(call.q.dtype)


def relate(products: jax.Array, act: str, mask: jax.Array | None) -> jax.Array:
    """Apply a relation's activation (spec.RELATION_ACTS) to (b r t s) products; softmax runs over visible keys."""
    if act != "softmax":
        return ACTIVATIONS[act](products)
    return softmax_visible(wide(products), mask, 3).astype(products.dtype)


def any_head(mask: jax.Array | None) -> jax.Array | None:
    """The mask of relations, which heads share: True where it is True for any head."""
    # All heads share a mask of one head.
    if mask is None or mask.ndim < 3 or mask.shape[-3] == 1:
        return mask
    return mask.any(-3, keepdims=True)


def check_call(op: str, call: AttentionCall) -> None:
    """The checks of masks and scale beyond those of `@shaped`."""
    if call.scale is not None and np.ndim(call.scale):  # an array would be broadcast along the widths of queries
        raise ValueError(f"{op}: scale must be a number but has shape {np.shape(call.scale)}; multiply q by it")
    check_masks(op, call.masks, call.q.shape[0], *call.lengths, _is_readable)


def _is_readable(x: Any) -> bool:
    """Whether an array has numbers: under jit it has none yet."""
    return not isinstance(x, jax.core.Tracer)


@shaped
def latent_code(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    *,
    normalise: str,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: Scale = None,
) -> Float[Array, "b h t s"]:
    """The latent code of every query-key pair: one number per head, computed before any value is read.

    Arguments and errors are those of `polyhead.ops.latent_code`.  Static under jit: normalise, causal, window.
    """
    one_of("latent_code", "normalise", normalise, NORMALISE)
    q, k = jnp.asarray(q), jnp.asarray(k)
    if q.dtype != k.dtype:
        raise ValueError(f"latent_code: q and k must have one dtype but have {q.dtype}, {k.dtype}")
    check_heads("latent_code", {"q": q.shape, "k": k.shape})
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, bias=bias, masks=masks, scale=scale, normalise=normalise)
    check_call("latent_code", call)
    call = jax.tree.map(jnp.asarray, call)
    return code(replace(call, k=zero_hidden_keys(call.masks.mask, call.k)))


@shaped
def relations(
    q_rel: Float[Array, "b t r p"],
    k_rel: Float[Array, "b s r p"],
    *,
    relation_act: str,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
) -> Float[Array, "b r t s"]:
    """The relations of every query-key pair, `act(q_rel . k_rel / sqrt(p))`.

    Arguments and errors are those of `polyhead.ops.relations`.  Static under jit: relation_act, causal, window.
    """
    one_of("relations", "relation_act", relation_act, RELATION_ACTS)
    q_rel, k_rel = jnp.asarray(q_rel), jnp.asarray(k_rel)
    if q_rel.dtype != k_rel.dtype:
        raise ValueError(f"relations: q_rel and k_rel must have one dtype but have {q_rel.dtype}, {k_rel.dtype}")
    check_heads("relations", {"q_rel": q_rel.shape, "k_rel": k_rel.shape})
    call = AttentionCall(q_rel, k_rel, masks=Masks(mask, causal, window, cu_seqlens))
    check_call("relations", call)
    call = jax.tree.map(jnp.asarray, call)
    keys = zero_hidden_keys(call.masks.mask, call.k) if relation_act == "softmax" else call.k
    products = inner(call.q, keys)
    return relate(products, relation_act, any_head(visible(call))).astype(call.q.dtype)


def inner(q_rel: jax.Array, k_rel: jax.Array) -> jax.Array:
    """q_rel . k_rel / sqrt(p), for shared relations (r) or one per head (h, written r here); in at least float32."""
    exact = jnp.promote_types(q_rel.dtype, jnp.float32)
    products = jnp.einsum("b t r p, b s r p -> b r t s", q_rel, k_rel, preferred_element_type=exact)
    return products * q_rel.shape[-1] ** -0.5
