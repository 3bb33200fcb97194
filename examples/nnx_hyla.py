"""HYLA heads as a Flax NNX module, trained for some steps.

    python examples/nnx_hyla.py

Needs `pip install 'polyhead[jax]' flax`.  Weights of a PyTorch layer `ph.MultiHeadAttention(dim, ph.Hyla(heads))` can
be copied: `load` takes its state dict as arrays.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from polyhead import jaxside


class HylaAttention(nnx.Module):
    """Causal HYLA self-attention, with the names, layouts and numbers of `ph.MultiHeadAttention(dim, ph.Hyla(heads))`.

    Attributes:
        qkv: Rows of queries, keys and values, head by head (3m m).
        out: The map from all heads to the output (m m).
    """

    def __init__(self, dim: int, num_heads: int, *, causal: bool = True, rngs: nnx.Rngs) -> None:
        if dim % num_heads:
            raise ValueError(f"HylaAttention: num_heads must divide dim {dim}, got {num_heads}")
        self.num_heads = num_heads
        self.causal = causal
        initialise = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.qkv = nnx.Param(initialise(rngs.params(), (3 * dim, dim)))
        self.out = nnx.Param(initialise(rngs.params(), (dim, dim)))

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Return (b t m) for x (b t m); `mask` broadcasts to (b h t s) and is True where a query may attend."""
        batch, num_tokens, dim = x.shape
        rows = jnp.einsum("b t m, n m -> b t n", x, self.qkv[...])
        rows = rows.reshape(batch, num_tokens, 3, self.num_heads, dim // self.num_heads)
        q, k, v = rows[:, :, 0], rows[:, :, 1], rows[:, :, 2]
        heads = jaxside.hyla(q, k, v, mask=mask, causal=self.causal)
        return jnp.einsum("b t n, m n -> b t m", heads.reshape(x.shape), self.out[...])

    def load(self, state: Mapping[str, jax.Array]) -> None:
        """Copy the weights of a PyTorch layer: `{name: x.numpy() for name, x in layer.state_dict().items()}`."""
        for name, parameter in (("qkv.weight", self.qkv), ("out.weight", self.out)):
            weight = jnp.asarray(state[name])
            if weight.shape != parameter.shape:
                raise ValueError(f"load: {name} must have shape {parameter.shape}, got {weight.shape}")
            parameter[...] = weight.astype(parameter.dtype)


def main() -> float:
    """Fit 20 steps of gradient descent to the sum of earlier tokens; return how much the loss fell."""
    model = HylaAttention(64, 8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (4, 12, 64))
    targets = jnp.cumsum(x, axis=1) / 4

    @nnx.jit
    def step(model: HylaAttention) -> jax.Array:
        value, gradient = nnx.value_and_grad(lambda model: jnp.square(model(x) - targets).mean())(model)
        parameters = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda parameter, slope: parameter - 0.1 * slope, parameters, gradient))
        return value

    losses = [float(step(model)) for _ in range(20)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0] - losses[-1]


if __name__ == "__main__":
    main()
