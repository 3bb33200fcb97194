"""The multi-head attention of the tutorial "Yet Another (JAX) Transformer" as a Haiku module over `polyhead.jaxside`.

    out = concat(head_1, ..., head_h) W_o,      head_i = softmax(q W_q,i (k W_k,i)' / sqrt(d)) v W_v,i

Names of parameters are the tutorial's: `multihead_attention/~/linear`, `linear_1` and `linear_2` map queries, keys and
values, `linear_3` is the output.  So its trees of parameters load unchanged.
"""

import math

from polyhead.spec.optional import optional

with optional("polyhead.compat.haiku.MultiheadAttention", "dm-haiku jax"):
    import haiku as hk
    import jax
    import jax.numpy as jnp

from polyhead import jaxside


class MultiheadAttention(hk.Module):
    """Softmax attention of `num_heads` heads of width d_model / num_heads, with biases.

    It computes what the tutorial's module computes, with four differences.  A query without a visible key gets the
    output bias and no gradient; the tutorial gives it the mean of all values.  float16 does not overflow.  Any number
    of dimensions may lie between batch and sequence.  A mask whose shape the tutorial reads wrongly is an error.
    """

    def __init__(self, d_model: int, num_heads: int, name: str | None = None) -> None:
        super().__init__(name=name)
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"MultiheadAttention: num_heads must divide d_model {d_model}, got {num_heads}")
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.lin_projs = [hk.Linear(d_model) for _ in range(4)]

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (out, attention): (B, ..., S, d_model) and (B, ..., heads, S, keys), for q (B, ..., S, d_model).

        Args:
            mask: Zeros hide keys, whatever the dtype.  The shape is (B|1, ..., 1|S, keys), or (B|1, 1|S, keys) for all
                dimensions between batch and sequence.
        """
        batch = q.shape[:-2]
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        if not batch or k.shape[:-2] != batch or v.shape[:-1] != k.shape[:-1]:
            shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            raise ValueError(f"MultiheadAttention: q, k, v must be (B, ..., S, {self.d_model}), got {shapes}")
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"MultiheadAttention: q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        visible = None
        if mask is not None:
            visible = visible_pairs(mask, (*batch, num_queries, num_keys))

        # Split into heads: (B ..., S, d_model) -> (b, S, h, d).
        heads = (self.num_heads, self.d_k)
        q = self.lin_projs[0](q).reshape(math.prod(batch), num_queries, *heads)
        k = self.lin_projs[1](k).reshape(math.prod(batch), num_keys, *heads)
        v = self.lin_projs[2](v).reshape(math.prod(batch), num_keys, *heads)

        # jit removes the attention where it is not used.
        mixed = jnp.asarray(jaxside.softmax_attention(q, k, v, mask=visible))
        attention = jnp.asarray(jaxside.latent_code(q, k, normalise="softmax", mask=visible))
        out = self.lin_projs[3](mixed.reshape(*batch, num_queries, self.d_model))
        return out, attention.reshape(*batch, *attention.shape[1:])


MultiHeadAttention = MultiheadAttention
"""The same class under the name that our other layers have; its parameters keep the tutorial's name."""


def visible_pairs(mask: jax.Array, pairs: tuple[int, ...]) -> jax.Array:
    """Return the tutorial's mask for `pairs` (B, ..., S, keys) as a Boolean mask (b 1 t s), True where visible.

    Raises:
        ValueError: For a shape that does not fit or has no batch: the tutorial's module would read a mask (heads, keys)
            as one row per head.
    """
    mask = jnp.asarray(mask)
    shape = tuple(mask.shape)
    if mask.ndim == 3:
        mask = mask.reshape(shape[0], *(1,) * (len(pairs) - 3), *shape[1:])
    fits = mask.ndim == len(pairs) and mask.shape[-1] == pairs[-1]
    for size, num_pairs in zip(mask.shape, pairs, strict=False):
        fits = fits and size in (1, num_pairs)
    if not fits:
        raise ValueError(
            f"MultiheadAttention: mask must be (B|1, 1|S, keys) for (B, ..., S, keys) = {pairs}, got {shape}"
        )
    mask = jnp.broadcast_to(mask != 0, (*pairs[:-2], *mask.shape[-2:]))
    return mask.reshape(-1, 1, *mask.shape[-2:])
