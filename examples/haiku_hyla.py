"""HYLA heads as a Haiku module: the tutorial's attention with another function between its linears.

    python examples/haiku_hyla.py

Needs `pip install 'polyhead[jax]' dm-haiku`.  The tutorial's module itself, with softmax heads, is
`polyhead.compat.haiku.MultiheadAttention`.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from polyhead import jaxside


class HylaAttention(hk.Module):
    """HYLA attention of `num_heads` heads of width d_model / num_heads, with biases.

    The latent code of a pair of tokens has one number per head.  It configures a small value network for the pair:

        out_i = sum_j code_ij W_o act(code_ij W_v v_j)
    """

    def __init__(self, d_model: int, num_heads: int, name: str | None = None) -> None:
        super().__init__(name=name)
        if d_model % num_heads:
            raise ValueError(f"HylaAttention: num_heads must divide d_model {d_model}, got {num_heads}")
        self.d_model = d_model
        self.num_heads = num_heads
        self.lin_projs = [hk.Linear(d_model) for _ in range(4)]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Return (B, S, d_model) for q (B, S, d_model); `mask` (B, 1|S, keys) is 0 where a key is hidden."""
        heads = []
        for linear, array in zip(self.lin_projs, (q, k, v), strict=False):
            head_width = self.d_model // self.num_heads
            heads.append(linear(array).reshape(*array.shape[:2], self.num_heads, head_width))
        visible = None if mask is None else mask[:, None] != 0
        out = jaxside.hyla(*heads, mask=visible)
        return self.lin_projs[-1](out.reshape(q.shape))


def main() -> float:
    """Fit 20 steps of gradient descent to random targets; return how much the loss fell."""
    attention = hk.without_apply_rng(hk.transform(lambda *inputs: HylaAttention(64, 8, name="hyla")(*inputs)))
    key_inputs, key_targets, key_mask, key_init = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(key_inputs, (2, 12, 64))
    targets = jax.random.normal(key_targets, (2, 12, 64))
    mask = jax.random.randint(key_mask, (2, 1, 12), minval=0, maxval=2)
    params = attention.init(key_init, x, x, x, mask)

    @jax.jit
    def step(params: hk.Params) -> tuple[jax.Array, hk.Params]:
        def loss(params: hk.Params) -> jax.Array:
            return jnp.square(attention.apply(params, x, x, x, mask) - targets).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda parameter, slope: parameter - 0.1 * slope, params, gradient)

    losses = []
    for _ in range(20):
        value, params = step(params)
        losses.append(float(value))
    print("parameters", *params)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0] - losses[-1]


if __name__ == "__main__":
    main()
