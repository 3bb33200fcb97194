"""Parts of the Flax NNX modules, with the names and layouts ([out, in]) of the PyTorch modules' parameters.

Linear(x) = W x + b                       Norm(x) = layer_norm(x) or rms_norm(x)
MlpLayer(x) = W_down act(W_up x)          SwigluLayer(x) = W2 (silu(W1 x) * W3 x)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from polyhead.jaxside import norms
from polyhead.jaxside.call import Array, scaled
from polyhead.jaxside.latent_code import act as activation
from polyhead.spec import NORMS
from polyhead.spec.numbers import TRUNCATION, swiglu_width
from polyhead.spec.shapes import check_number, named, one_of


class Fixed(nnx.Variable):
    """A variable that is saved with the parameters but not learned."""


class Initialiser:
    """Initial parameters by a preset, "cs336" or "hyla", from a stream of random keys."""

    def __init__(self, rngs: nnx.Rngs | None, preset: str = "cs336", dtype: DTypeLike = jnp.float32) -> None:
        self.rngs, self.preset, self.dtype = nnx.Rngs(0) if rngs is None else rngs, preset, dtype

    def _cut(self, shape: Sequence[int], std: float, most: float) -> Array:
        return std * jax.random.truncated_normal(self.rngs.params(), -most, most, shape, self.dtype)

    def _values(self, shape: Sequence[int], fan_in: int, fan_out: int) -> Array:
        if self.preset == "hyla":
            return self._cut(shape, fan_in**-0.5 / TRUNCATION, 2.0)
        return self._cut(shape, (2.0 / (fan_in + fan_out)) ** 0.5, 3.0)

    def matrix(self, *shape: int) -> nnx.Param:
        """Weights [..., out, in]."""
        return nnx.Param(self._values(shape, shape[-1], shape[-2]))

    def joint(self, rows: Sequence[int], inputs: int) -> nnx.Param:
        """Several weights stacked along their rows, each drawn as if alone; `rows` has the rows of each."""
        return nnx.Param(jnp.concatenate([self._values((n, inputs), inputs, n) for n in rows]))

    def table(self, count: int, dim: int) -> nnx.Param:
        """A table of token embeddings."""
        if self.preset == "hyla":
            return self.normal(count, dim, std=dim**-0.5)
        return nnx.Param(self._cut((count, dim), 1.0, 3.0))

    def normal(self, *shape: int, std: float = 1.0) -> nnx.Param:
        """N(0, std^2)."""
        return nnx.Param(std * jax.random.normal(self.rngs.params(), shape, self.dtype))

    def uniform(self, *shape: int, bound: float) -> nnx.Param:
        """Uniform between -bound and bound."""
        return nnx.Param(jax.random.uniform(self.rngs.params(), shape, self.dtype, -bound, bound))

    def full(self, value: float, size: int) -> nnx.Param:
        """A constant."""
        return nnx.Param(jnp.full(size, value, self.dtype))


def drawn_by(rngs: nnx.Rngs | Initialiser | None, dtype: DTypeLike) -> Initialiser:
    """The initialiser of a layer that a user builds; parts of a model are given that of the model."""
    return rngs if isinstance(rngs, Initialiser) else Initialiser(rngs, dtype=dtype)


class Identity(nnx.Module):
    """Returns its input."""

    def __call__(self, x: Array) -> Array:
        return x


class Linear(nnx.Module):
    """`W x + b` with W [out, in]; `rows`: the rows of each of several stacked maps."""

    bias: nnx.Param | None

    def __init__(
        self, inputs: int, outputs: int, draw: Initialiser, *, bias: bool = True, rows: Sequence[int] = ()
    ) -> None:
        self.weight = draw.joint(rows or (outputs,), inputs)
        self.bias = draw.full(0.0, outputs) if bias else None

    def __call__(self, x: Array, first: int = 0, last: int | None = None) -> Array:
        """The outputs `first` to `last`."""
        y = jnp.einsum("... i, o i -> ... o", x, self.weight[...][first:last])
        return y if self.bias is None else y + self.bias[...][first:last]


@named
class Norm(nnx.Module):
    """LayerNorm, or RMSNorm, which has no bias; `kind` is "layer" or "rms"."""

    bias: nnx.Param | None

    def __init__(
        self,
        dim: int,
        rngs: nnx.Rngs | Initialiser | None = None,
        *,
        kind: str = "layer",
        eps: float = 1e-5,
        bias: bool = True,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        check_number("Norm", "eps", eps, 0)
        draw = drawn_by(rngs, dtype)
        self.kind, self.eps = one_of("norm", "kind", kind, NORMS), eps
        self.weight = draw.full(1.0, dim)
        self.bias = draw.full(0.0, dim) if bias and kind == "layer" else None

    def __call__(self, x: Array) -> Array:
        if self.kind == "rms":
            return norms.rms_norm(x, self.weight[...], self.eps)
        return norms.layer_norm(x, self.weight[...], None if self.bias is None else self.bias[...], self.eps)


def parted(x: Array, parts: int) -> Array:
    """(... n) as (... parts n/parts).  Sizes are given, because an empty array has no size -1."""
    return x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)


def joined(x: Array) -> Array:
    """(... parts n) as (... parts*n): the inverse of `parted`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def rows_of(table: Array, index: Array) -> Array:
    """The rows of a table; NaN where it has none, because JAX would silently take another row."""
    return jnp.asarray(table).at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


class Embedding(nnx.Module):
    """A table of `count` vectors."""

    def __init__(self, count: int, dim: int, draw: Initialiser) -> None:
        self.weight = draw.table(count, dim)


@named
class MlpLayer(nnx.Module):
    """`W_down act(W_up x)`; `hidden` defaults to 4 dim."""

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        rngs: nnx.Rngs | Initialiser | None = None,
        *,
        act: str = "gelu",
        bias: bool = True,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        hidden, draw = 4 * dim if hidden is None else hidden, drawn_by(rngs, dtype)
        self.act = act
        self.up, self.down = Linear(dim, hidden, draw, bias=bias), Linear(hidden, dim, draw, bias=bias)

    def __call__(self, x: Array) -> Array:
        return self.down(activation(self.act, "MlpLayer")(jnp.asarray(self.up(x))))


@named
class SwigluLayer(nnx.Module):
    """`W2 (silu(W1 x) * W3 x)`; `hidden` defaults to `swiglu_width(dim)`."""

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        rngs: nnx.Rngs | Initialiser | None = None,
        *,
        bias: bool = False,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        hidden, draw = swiglu_width(dim) if hidden is None else hidden, drawn_by(rngs, dtype)
        self.w1, self.w3 = (Linear(dim, hidden, draw, bias=bias) for _ in range(2))
        self.w2 = Linear(hidden, dim, draw, bias=bias)

    def __call__(self, x: Array) -> Array:
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


def dropped(x: Array, rate: float, rngs: nnx.Rngs | None) -> Array:
    """`x` with dropout of that rate; without `rngs` none."""
    if rngs is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rngs.dropout(), 1.0 - rate, x.shape)
    return jnp.where(keep, scaled(x, 1.0 / (1.0 - rate)), 0)
