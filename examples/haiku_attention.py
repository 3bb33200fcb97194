"""The multi-head attention of the tutorial "Yet Another (JAX) Transformer" as a Haiku module over polyhead's functions.

    python examples/haiku_attention.py

Needs `pip install 'polyhead[jax]' dm-haiku`.  Names of parameters are the tutorial's, so its trees load as they are
(`mha/~/linear`, `linear_1`, `linear_2`: queries, keys, values; `linear_3`: output).  `polyhead.jaxside.convert` makes
a Flax module of such a tree, `polyhead.compat.haiku` one of PyTorch.  docs/jax.md says more.
"""

import math

import haiku as hk
import jax
import jax.numpy as jnp

from polyhead import jaxside

Attended = tuple[jax.Array, jax.Array]


class MultiheadAttention(hk.Module):
    """Softmax attention of `num_heads` heads, each of width d_model / num_heads, with biases.

        out = concat(head_1, ..., head_h) W_o,      head_i = softmax(q W_q,i (k W_k,i)' / sqrt(d)) v W_v,i

    What differs from the tutorial's: a query that may look nowhere gets the output bias alone, no gradient and an
    attention of 0, where filling with -1e9 gives the mean of all values; nothing overflows in half precision; there
    may be any number of dimensions between batch and sequence; masks that would be read wrongly are errors.
    """

    def __init__(self, d_model: int, num_heads: int, name: str | None = None) -> None:
        super().__init__(name=name)
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"MultiheadAttention: num_heads must divide d_model {d_model} but is {num_heads}")
        self.d_model, self.num_heads = d_model, num_heads
        self.lin_projs = [hk.Linear(d_model) for _ in range(4)]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> Attended:
        """(out (B, ..., S, d_model), attention (B, ..., heads, S, keys)) of q (B, ..., S, d_model) and k, v.

        `mask` is boolean or of integers, any but 0 attends: (B|1, 1|S, keys), the same for all dimensions between
        batch and sequence, or (B|1, ..., 1|S, keys) with these; never without a batch.  Attention is per head; where
        it is not used, jit computes nothing for it.
        """
        lead, length = q.shape[:-2], q.shape[-2]
        if len(lead) == 0 or k.shape[:-2] != lead or v.shape[:-1] != k.shape[:-1]:
            came = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"MultiheadAttention: q, k, v must be (B, ..., S, {self.d_model}) but are {came}")
        look = None if mask is None else allowed(mask, (*lead, length, k.shape[-2]))
        split = (math.prod(lead), -1, self.num_heads, self.d_model // self.num_heads)
        q, k, v = (f(x).reshape(split) for f, x in zip(self.lin_projs[:3], (q, k, v), strict=True))
        heads = jaxside.softmax_attention(q, k, v, mask=look)
        attention = jaxside.latent_code(q, k, normalise="softmax", mask=look)
        out = self.lin_projs[3](heads.reshape(*lead, length, self.d_model))
        return out, attention.reshape(*lead, *attention.shape[1:])


def allowed(mask: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    """The mask of a call, whose scores of one head are (B, ..., S, keys), as polyhead's: boolean (b 1 t s).

    Raises ValueError for one without a batch, which the tutorial's module would read as one per head, for one that
    does not fit, and for floating numbers, which elsewhere mean something to be added to the scores.
    """
    mask = jnp.asarray(mask)
    if not (jnp.issubdtype(mask.dtype, jnp.bool_) or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(f"MultiheadAttention: mask must be boolean or of integers but is {mask.dtype}")
    full = mask.reshape(mask.shape[0], *(1,) * (len(scores) - 3), *mask.shape[1:]) if mask.ndim == 3 else mask
    if full.ndim != len(scores) or any(n not in (1, want) for n, want in zip(full.shape, scores, strict=True)):
        wanted = f"(B|1, 1|S, keys) of (B, ..., S, keys) = {scores}"
        raise ValueError(f"MultiheadAttention: mask must be {wanted} but has shape {tuple(mask.shape)}")
    if full.shape[-1] != scores[-1]:
        raise ValueError(f"MultiheadAttention: mask must name all {scores[-1]} keys but has shape {tuple(mask.shape)}")
    rows = (*scores[:-2], *full.shape[-2:])
    return (jnp.broadcast_to(full, rows) != 0).reshape(-1, 1, *full.shape[-2:])


def main() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two sequences of 12 vectors, some of whose keys are hidden."""
    mha = hk.without_apply_rng(hk.transform(lambda *given: MultiheadAttention(64, 8, name="mha")(*given)))
    first, second, third = jax.random.split(jax.random.key(0), 3)
    q, k, v = jax.random.normal(first, (3, 2, 12, 64))
    mask = jax.random.randint(second, (2, 1, 12), minval=0, maxval=2)
    params = mha.init(third, q, k, v, mask)
    out, attention = mha.apply(params, q, k, v, mask)
    print("parameters", *params)
    print("Out", out.shape, "Attention", attention.shape)
    return out.shape, attention.shape


if __name__ == "__main__":
    main()
